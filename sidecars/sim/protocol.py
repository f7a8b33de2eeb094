"""SGLang's request and answer shapes, without IO: a body becomes sequences to run, a finished run becomes
JSON.

Three ways to say no, as the real engine has them: `Invalid` is an answer with a status, `Deadly` is a request
that the engine accepts and does not survive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecars.sim import tokenizer

DEFAULT_MAX_NEW_TOKENS = 128
SAMPLING_FIELDS = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex"),
    *("ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    *("no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark"),
    "choice",
)
"""What `sampling_params` may hold on SGLang's own route; anything else is refused."""


class Invalid(Exception):
    """The request is refused. `validation` chooses between the two shapes of an error body."""

    def __init__(
        self, message: str, *, validation: bool = False, schema: bool = False, kind: str = "BadRequest"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.validation = validation or schema
        self.schema = schema
        """Found by the check of `sampling_params`, which has a third shape and comes before a stream begins."""
        self.kind = kind

    def native_body(self) -> dict[str, Any]:
        """The body on SGLang's own routes."""
        if self.schema:
            return {"error": self.message}
        return self.openai_body() if self.validation else {"error": {"message": self.message}}

    def openai_body(self) -> dict[str, Any]:
        """The body on the OpenAI routes, and of every body that does not validate."""
        kind = "Bad Request" if self.validation else self.kind
        return {"object": "error", "message": self.message, "type": kind, "param": None, "code": 400}

    def stream_event(self) -> dict[str, Any]:
        """The event of a stream that fails before its first token; the status is 200 by then."""
        return {
            "error": {
                "message": self.message,
                "type": "invalid_request_error",
                "code": 400,
                "retryable": False,
            }
        }


class Broken(Exception):
    """The request makes the server answer 500 and changes nothing."""


class Deadly(Exception):
    """The request ends the engine's process."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters that change what a simulated engine says."""

    max_new_tokens: int | None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Which log-probabilities were asked for. `start` is the first prompt position, len(prompt) for none."""

    start: int
    top: int = 0
    token_ids: tuple[int, ...] | None = None
    with_text: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence to run."""

    rid: str
    prompt: tuple[int, ...]
    sampling: Sampling
    logprobs: Logprobs | None
    cached: int = 0
    """Prompt tokens that an earlier copy of the same request left in the cache."""


@dataclass(frozen=True, slots=True)
class Generate:
    """A whole /generate request: one sequence, or a batch whose answer is a list."""

    sequences: tuple[Item, ...]
    stream: bool
    batch: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What the pretended model can take."""

    vocab_size: int
    context_length: int


def parse_generate(body: Any, limits: Limits, fresh_rid: str) -> Generate:
    """A /generate body. Raises `Invalid` or `Deadly`; `fresh_rid` names the request when it does not."""
    if not isinstance(body, Mapping):
        raise Invalid("the body must be a JSON object", validation=True)
    stream = _typed(body, "stream", bool, False)
    prompts, batch = _prompts(body)
    if not prompts:
        return Generate((), stream, batch)
    params = body.get("sampling_params")
    if isinstance(params, list) and not batch:
        raise Broken("sampling_params is a list and the request is no batch")
    given = _spread(params, len(prompts), "sampling_params", None)
    samplings = [parse_sampling(item) for item in given]
    for item in given:
        check_sampling(item or {}, limits)
    copies = {_copies(item) for item in given}
    if len(copies) > 1:
        raise Invalid("The parallel_sample_num should be the same for all samples in sample params.")
    count = copies.pop()
    rids = _rids(body.get("rid"), len(prompts) * count, batch or count > 1, fresh_rid)
    sequences = []
    for copy in range(count):
        for index, prompt in enumerate(prompts):
            sampling = samplings[index]
            check_length(prompt, _asked(given[index]), limits)
            logprobs = _logprobs(body, index, len(prompts), prompt, limits)
            rid = rids[copy * len(prompts) + index]
            sequences.append(Item(rid, prompt, sampling, logprobs, len(prompt) - 1 if count > 1 else 0))
    for prompt in prompts:
        check_tokens(prompt, limits)
    return Generate(tuple(sequences), stream, batch or count > 1)


def _typed(body: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Invalid(f"{key}: Input should be a valid {kind.__name__}, got {value!r}"[:400], validation=True)
    return value


def _prompts(body: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if text is None and ids is None:
        raise Invalid("Either text, input_ids or input_embeds should be provided.")
    if ids is not None:
        return _token_prompts(ids, alone=text is None)
    if isinstance(text, str):
        return [tuple(tokenizer.encode(text))], False
    if isinstance(text, list) and all(isinstance(item, str) for item in text):
        return [tuple(tokenizer.encode(item)) for item in text], True
    raise Invalid("text: Input should be a string or a list of strings", validation=True)


def _token_prompts(ids: Any, *, alone: bool) -> tuple[list[tuple[int, ...]], bool]:
    """Prompts out of `input_ids`, which win over a text; only without a text are they checked to be there."""
    if isinstance(ids, list):
        if not ids and alone:
            raise Invalid("input_ids cannot be empty.")
        if all(type(item) is int for item in ids):
            return [tuple(ids)], False
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in ids):
            return [tuple(item) for item in ids], True
    raise Invalid("input_ids: Input should be a list of integers", validation=True)


def _spread(value: Any, count: int, name: str, default: Any) -> list[Any]:
    if isinstance(value, list):
        if len(value) != count:
            raise Invalid(f"The length of {name} should be equal to the batch size.")
        return value
    return [default if value is None else value] * count


def _rids(given: Any, count: int, many: bool, fresh: str) -> list[str]:
    if given is None:
        return [f"{fresh}{index:04x}" for index in range(count)] if many else [fresh]
    if isinstance(given, str):
        return [f"{given}_{index}" for index in range(count)] if many else [given]
    if isinstance(given, list) and all(isinstance(item, str) for item in given):
        if len(given) != count:
            raise Invalid("The specified rids length mismatch with the batch_size for batch processing.")
        if len(set(given)) != count:
            raise Invalid("Duplicate request IDs detected within the request")
        return given
    raise Invalid("rid: Input should be a string or a list of strings", validation=True)


def _copies(params: Any) -> int:
    """How many answers; anything below one is one, as in SGLang."""
    value = _parameter(params, "n", int, 1) if isinstance(params, Mapping) else 1
    return max(int(value), 1)


def parse_sampling(params: Any, default_max: int | None = DEFAULT_MAX_NEW_TOKENS) -> Sampling:
    """Sampling parameters; `Invalid` with SGLang's sentence when a value is out of range."""
    if params is None:
        params = {}
    if not isinstance(params, Mapping):
        raise Invalid("sampling_params: Input should be a valid dictionary", validation=True)
    for key in params:
        if key not in SAMPLING_FIELDS:
            known = ", ".join(f"`{name}`" for name in SAMPLING_FIELDS)
            raise Invalid(f"unknown field `{key}`, expected one of {known}", schema=True)
    temperature = _number(params, "temperature", 1.0)
    if not math.isfinite(temperature) or temperature < 0:
        raise Invalid(f"temperature must be a non-negative finite number, got {temperature}.")
    top_p = _number(params, "top_p", 1.0)
    if not 0 < top_p <= 1:
        raise Invalid(f"top_p must be in (0, 1], got {top_p}.")
    top_k = _parameter(params, "top_k", int, -1)
    if top_k < -1 or top_k == 0:
        raise Invalid(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    longest = _parameter(params, "max_new_tokens", int, default_max)
    if longest is not None and longest < 0:
        raise Invalid(f"max_new_tokens must be at least 0, got {longest}.")
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise Invalid(f"invalid type: {stop!r}, expected a value or an array of values for StringOrList", schema=True)
    return Sampling(
        max_new_tokens=longest,
        stop=tuple(item for item in stops if item),
        stop_token_ids=frozenset(_parameter(params, "stop_token_ids", list, [])),
        ignore_eos=_parameter(params, "ignore_eos", bool, False),
        skip_special_tokens=_parameter(params, "skip_special_tokens", bool, True),
        no_stop_trim=_parameter(params, "no_stop_trim", bool, False),
        seed=_parameter(params, "sampling_seed", int, None),
    )


def check_sampling(params: Mapping[str, Any], limits: Limits) -> None:
    """What SGLang checks once it knows the vocabulary (`Invalid`), and what it does not (`Deadly`)."""
    shortest = _parameter(params, "min_new_tokens", int, 0)
    longest = _parameter(params, "max_new_tokens", int, None)
    if shortest < 0:
        raise Invalid(f"min_new_tokens must be in [0, max_new_tokens], got {shortest}.")
    if longest is not None and shortest > longest:
        raise Invalid(f"min_new_tokens must be in [0, max_new_tokens({longest})], got {shortest}.")
    for key in _parameter(params, "logit_bias", dict, {}):
        try:
            known = 0 <= int(key) < limits.vocab_size
        except ValueError as error:
            raise Invalid(str(error)) from error
        if not known:
            raise Invalid(f"logit_bias must has keys in [0, {limits.vocab_size - 1}], got {key}.")
    if _parameter(params, "top_k", int, -1) >= 1 << 31:
        raise Deadly("OverflowError: top_k does not fit into 32 bits")
    stops = _parameter(params, "stop_token_ids", list, [])
    if shortest > 0 and not all(0 <= token < limits.vocab_size for token in stops):
        raise Deadly("IndexError: a stop token is out of bounds for the logits (min_new_tokens)")


def _parameter(params: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """A sampling parameter; of another type it is refused by the schema."""
    value = params.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Invalid(f"invalid type: {key} is {value!r}, expected {kind.__name__}"[:400], schema=True)
    return value


def _number(params: Mapping[str, Any], key: str, default: float) -> float:
    value = params.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Invalid(f"invalid type: {key} is {value!r}, expected f64"[:400], schema=True)
    return float(value)


def _asked(params: Any) -> int | None:
    return params.get("max_new_tokens") if isinstance(params, Mapping) else None


def check_length(prompt: Sequence[int], longest: int | None, limits: Limits) -> None:
    """`Invalid` when the prompt, or the prompt and a length that was asked for, do not fit into the context."""
    if len(prompt) >= limits.context_length:
        raise Invalid(
            f"The input ({len(prompt)} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens)."
        )
    if longest is not None and len(prompt) + longest > limits.context_length:
        raise Invalid(
            "Requested token count exceeds the model's maximum context length of "
            f"{limits.context_length} tokens. You requested a total of {len(prompt) + longest} tokens: "
            f"{len(prompt)} tokens from the input messages and {longest} tokens for the completion. Please reduce "
            "the number of tokens in the input messages or the completion to fit within the limit."
        )


def check_tokens(prompt: Sequence[int], limits: Limits) -> None:
    """`Deadly` for a prompt without tokens, or with one that the vocabulary does not have."""
    if not prompt:
        raise Deadly("IndexError: index is out of bounds for dimension with size 0 (a prompt without tokens)")
    if not all(0 <= token < limits.vocab_size for token in prompt):
        raise Deadly(f"CUDA error: device-side assert triggered (token id outside 0..{limits.vocab_size - 1})")


def _logprobs(
    body: Mapping[str, Any], index: int, count: int, prompt: Sequence[int], limits: Limits
) -> Logprobs | None:
    def pick(key: str, default: Any) -> Any:
        return _spread(body.get(key), count, key, default)[index]

    if not pick("return_logprob", False):
        return None
    start = pick("logprob_start_len", -1)
    top = pick("top_logprobs_num", 0)
    if type(start) is not int or type(top) is not int:
        raise Invalid("logprob_start_len and top_logprobs_num: Input should be integers", validation=True)
    if start < -1:
        raise Deadly(f"IndexError: logprob_start_len {start} is out of range")
    if top > limits.vocab_size:
        raise Deadly(f"RuntimeError: selected index k out of range (top_logprobs_num {top})")
    if start > len(prompt):
        raise Invalid(
            f"req.logprob_start_len={start} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={len(prompt)}. Please use a smaller logprob_start_len."
        )
    wanted = body.get("token_ids_logprob")
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], list):
        wanted = _spread(wanted, count, "token_ids_logprob", None)[index]
    ids = None if wanted is None else tuple(wanted)
    if ids is not None and not all(type(token) is int for token in ids):
        raise Invalid("token_ids_logprob: Input should be a list of integers", validation=True)
    for token in ids or ():
        if not 0 <= token < limits.vocab_size:
            raise Invalid(
                f"token_ids_logprob contains out-of-vocabulary token id {token}; valid range is [0, "
                f"{limits.vocab_size})."
            )
    first = len(prompt) if start == -1 else start
    return Logprobs(first, max(top, 0), ids, bool(body.get("return_text_in_logprobs")))
