"""The OpenAI-shaped routes: a chat or completion body becomes sequences, their results become OpenAI JSON.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecars.sim import tokenizer
from sidecars.sim.protocol import (
    Deadly,
    Invalid,
    Item,
    Limits,
    Logprobs,
    Sampling,
    check_length,
    check_sampling,
    check_tokens,
    parse_sampling,
)

NO_DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": None}
DEFAULT_MODEL = "default"
"""Name of the model in answers to requests that name none."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One request on an OpenAI route."""

    items: tuple[Item, ...]
    model: str
    stream: bool
    include_usage: bool
    chat: bool
    copies: int = 1
    """Answers per prompt."""
    echo: bool = False
    """Whether the prompt goes before its answers."""

    def prefix(self, index: int) -> str:
        """What goes before choice `index`."""
        return tokenizer.decode(self.items[index].prompt) if self.echo else ""


def parse(body: Any, limits: Limits, fresh: str, *, chat: bool) -> Completion:
    """A chat or completion body. Any model name is accepted: telling models apart is the gateway's
    business.
    """
    if not isinstance(body, Mapping):
        raise Invalid("the body must be a JSON object", validation=True)
    prompts = [_chat_prompt(body)] if chat else _completion_prompts(body)
    sampling = _sampling(body, limits, chat=chat)
    count = body.get("n", 1)
    if type(count) is not int or not 1 <= count <= 128:
        raise Invalid(f"n: Input should be an integer from 1 to 128, got {count!r}", validation=True)
    options = body.get("stream_options")
    usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
    items: list[Item] = []
    for prompt in prompts:
        check_length(prompt, sampling.max_new_tokens, limits)
        check_tokens(prompt, limits)
        logprobs = _logprobs(body, len(prompt), limits, chat=chat)
        for index in range(count):
            rid = fresh if len(prompts) * count == 1 else f"{fresh}{len(items):04x}"
            items.append(Item(rid, prompt, _seeded(sampling, index), logprobs))
    model = body.get("model")
    echo = not chat and bool(body.get("echo"))
    name = model if isinstance(model, str) else DEFAULT_MODEL
    return Completion(tuple(items), name, bool(body.get("stream")), usage, chat, count, echo)


def _chat_prompt(body: Mapping[str, Any]) -> tuple[int, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise Invalid("messages: Field required", validation=True)
    if not messages:
        raise Invalid("Messages cannot be empty.", kind="BadRequestError")
    pairs: list[tuple[str, str]] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Invalid("messages: Input should be a list of {role, content}", validation=True)
        pairs.append((message["role"], _content(message.get("content"))))
    return tuple(tokenizer.encode(tokenizer.render_chat(pairs)))


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    raise Invalid("messages.content: Input should be a valid string", validation=True)


def _completion_prompts(body: Mapping[str, Any]) -> list[tuple[int, ...]]:
    prompt = body.get("prompt")
    if prompt in ("", []):
        raise Invalid("Prompt cannot be empty", kind="BadRequestError")
    if isinstance(prompt, str):
        return [tuple(tokenizer.encode(prompt))]
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            return [tuple(prompt)]
        if all(isinstance(item, str) for item in prompt):
            return [tuple(tokenizer.encode(item)) for item in prompt]
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
            return [tuple(item) for item in prompt]
    raise Invalid("prompt: Input should be a valid string or a list of integers", validation=True)


def _sampling(body: Mapping[str, Any], limits: Limits, *, chat: bool) -> Sampling:
    longest = body.get("max_completion_tokens") if chat else None
    if longest is None:
        longest = body.get("max_tokens")
    keys = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim", "logit_bias")
    params = {key: body[key] for key in (*keys, "skip_special_tokens") if key in body}
    params["max_new_tokens"] = longest
    params["min_new_tokens"] = body.get("min_tokens")
    params["sampling_seed"] = body.get("seed")
    sampling = parse_sampling(params, None if chat else 16)
    check_sampling(params, limits)
    return sampling


def _seeded(sampling: Sampling, index: int) -> Sampling:
    if index == 0:
        return sampling
    return Sampling(
        max_new_tokens=sampling.max_new_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        skip_special_tokens=sampling.skip_special_tokens,
        no_stop_trim=sampling.no_stop_trim,
        seed=(sampling.seed or 0) + index,
    )


def _logprobs(body: Mapping[str, Any], prompt_length: int, limits: Limits, *, chat: bool) -> Logprobs | None:
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    top = (body.get("top_logprobs") or 0) if chat else wanted
    if not isinstance(top, int):
        raise Invalid(f"top_logprobs: Input should be a valid integer, got {top!r}"[:400], validation=True)
    if top > limits.vocab_size:
        raise Deadly(f"RuntimeError: selected index k out of range (top_logprobs {top})")
    return Logprobs(prompt_length, max(int(top), 0), None, with_text=True)


def usage(results: Sequence[Mapping[str, Any]], copies: int) -> dict[str, Any]:
    """Token counts over all choices; every prompt counts once, however many answers it has."""
    metas = [result["meta_info"] for result in results]
    prompt = sum(meta["prompt_tokens"] for meta in metas[::copies])
    completion = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "reasoning_tokens": 0,
    }


def whole(request: Completion, results: Sequence[Mapping[str, Any]], created: int) -> dict[str, Any]:
    """The answer of a request that does not stream."""
    choices = [_choice(request, index, result) for index, result in enumerate(results)]
    first = results[0]["meta_info"]
    return {
        "id": first["id"],
        "object": "chat.completion" if request.chat else "text_completion",
        "created": created,
        "model": request.model,
        "choices": choices,
        "usage": {**usage(results, request.copies), **NO_DETAILS},
        "metadata": {"weight_version": first["weight_version"], "weight_versions": first["weight_versions"]},
    }


def _choice(request: Completion, index: int, result: Mapping[str, Any]) -> dict[str, Any]:
    finish = result["meta_info"]["finish_reason"]
    choice: dict[str, Any] = {"index": index}
    if request.chat:
        choice["message"] = {"role": "assistant", "content": result["text"], "reasoning_content": None}
    else:
        choice["text"] = request.prefix(index) + result["text"]
    choice["logprobs"] = logprobs_of(request, result["meta_info"], 0)
    choice["finish_reason"] = finish["type"]
    choice["matched_stop"] = finish.get("matched")
    return choice


def logprobs_of(request: Completion, meta: Mapping[str, Any], since: int) -> dict[str, Any] | None:
    """Log-probs of output tokens from number `since` on, in the shape of the route; None when not asked
    for.
    """
    if "output_token_logprobs" not in meta:
        return None
    rows = meta["output_token_logprobs"][since:]
    tops = meta.get("output_top_logprobs", [[]] * (since + len(rows)))[since:]
    if request.chat:
        content = [
            {**_token(row), "top_logprobs": [_token(entry) for entry in top]}
            for row, top in zip(rows, tops, strict=True)
        ]
        return {"content": content}
    return {
        "text_offset": [-1] * len(rows),
        "token_logprobs": [row[0] for row in rows],
        "tokens": [row[2] for row in rows],
        "top_logprobs": [{entry[2]: entry[0] for entry in top} for top in tops],
    }


def _token(row: Sequence[Any]) -> dict[str, Any]:
    return {"token": row[2], "bytes": list(row[2].encode()), "logprob": row[0]}


class ChunkWriter:
    """Turns cumulative results of one choice into delta chunks."""

    def __init__(self, request: Completion, index: int, created: int) -> None:
        self._request = request
        self._index = index
        self._created = created
        self._sent_text = 0
        self._sent_tokens = 0
        self._begun = False

    def chunks(self, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks that `result` adds, the finishing one included."""
        meta, chat = result["meta_info"], self._request.chat
        begins, self._begun = not self._begun, True
        fresh = result["text"][self._sent_text :]
        self._sent_text += len(fresh)
        logprobs = logprobs_of(self._request, meta, self._sent_tokens)
        self._sent_tokens = meta["completion_tokens"]
        finish = meta["finish_reason"]
        if not chat:
            # One chunk for everything: the echo comes with the first text, the reason to stop with the last.
            yield self._chunk(meta, self._request.prefix(self._index) + fresh if begins else fresh, logprobs, finish)
            return
        if begins:
            yield self._chunk(meta, {"reasoning_content": None, "role": "assistant", "content": ""})
        if fresh:
            yield self._chunk(meta, {"reasoning_content": None, "content": fresh}, logprobs)
        if finish is not None:
            yield self._chunk(meta, {"reasoning_content": None}, finish=finish)

    def _chunk(
        self,
        meta: Mapping[str, Any],
        delta: Any,
        logprobs: dict[str, Any] | None = None,
        finish: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        chat = self._request.chat
        choice = {
            "index": self._index,
            "delta" if chat else "text": delta,
            "logprobs": logprobs,
            "finish_reason": finish["type"] if finish else None,
            "matched_stop": finish.get("matched") if finish else None,
        }
        return chunk_frame(self._request, meta["id"], self._created, [choice])


def chunk_frame(
    request: Completion,
    rid: str,
    created: int,
    choices: list[dict[str, Any]],
    total: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One chunk; the last one of a stream with usage has no choices. Chunks of a chat leave out what is not there."""
    kind = "chat.completion.chunk" if request.chat else "text_completion"
    chunk = {"id": rid, "object": kind, "created": created, "model": request.model, "choices": choices}
    if not request.chat:
        return {**chunk, "usage": total}
    return chunk if total is None else {**chunk, "usage": {**total, **NO_DETAILS}}
