"""Every request whose answer is on record: what SGLang said, and what the simulated engine has to say alike.

An `Exchange` leaves an engine as it found it, so all of them run on one. `ask` makes a recording of it: status, kind of
content and body, or the events of a stream. `shape` keeps of a recording what two engines must have in common: names,
kinds and nesting, without a word of text or a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.contract.engine_program import Launched

GOLDEN = Path(__file__).parent / "golden"
PROMPT = [7, 8, 9, 10, 11, 12]
SHORT = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
TEXT = "2 + 3 ="
CHAT = {"model": "policy", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "temperature": 0}
OPEN = {**CHAT, "ignore_eos": True}
COMPLETION = {"model": "policy", "prompt": TEXT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
JSON_HEADER = {"content-type": "application/json"}
TOKENS = frozenset({"top_logprobs"})
"""Its names are tokens."""
OLD_VERSION = (("/update_weight_version", {"new_version": "default"}),)
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5, 6]}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request. `body` is sent as JSON, bytes as they are; `after` puts right what it changed."""

    name: str
    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    after: tuple[tuple[str, Any], ...] = ()
    only_known: bool = False
    """The simulator may leave fields out, but not invent any."""
    loose: frozenset[str] = frozenset()
    """Names of fields whose content depends on the model or the machine: only their presence counts."""

    def __str__(self) -> str:
        return self.name


def _post(name: str, path: str, body: Any, **more: Any) -> Exchange:
    return Exchange(name, "POST", path, body, **more)


def _generate(name: str, body: Any, **more: Any) -> Exchange:
    return _post(name, "/generate", body, **more)


def _get(name: str, path: str, **more: Any) -> Exchange:
    return Exchange(name, "GET", path, **more)


GENERATE = (
    _generate("ids", {"input_ids": PROMPT, "sampling_params": SHORT}),
    _generate("text", {"text": TEXT, "sampling_params": SHORT}),
    _generate("named", {"input_ids": PROMPT, "rid": "golden-0001", "sampling_params": SHORT}),
    Exchange("put", "PUT", "/generate", {"input_ids": PROMPT, "sampling_params": SHORT}),
    _generate("logprobs", {"input_ids": PROMPT, "sampling_params": SHORT, **LOGPROBS}),
    _generate("logprobs of the output only", {"input_ids": PROMPT, "sampling_params": SHORT, "return_logprob": True}),
    _generate(
        "logprobs from the middle",
        {"input_ids": PROMPT, "sampling_params": SHORT, "return_logprob": True, "logprob_start_len": 3},
    ),
    _generate(
        "logprobs with text",
        {"input_ids": PROMPT, "sampling_params": SHORT, **LOGPROBS, "return_text_in_logprobs": True},
    ),
    _generate(
        "score",
        {
            "input_ids": PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
            "return_logprob": True,
            "logprob_start_len": 2,
        },
    ),
    _generate(
        "score with top",
        {
            "input_ids": PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 3,
        },
    ),
    _generate("batch", {"input_ids": [PROMPT, PROMPT[:3]], "sampling_params": SHORT}),
    _generate("batch of one", {"text": [TEXT], "sampling_params": SHORT}),
    _generate("batch with a list of parameters", {"text": [TEXT, TEXT], "sampling_params": [SHORT, SHORT]}),
    _generate("several answers", {"input_ids": PROMPT, "sampling_params": {**SHORT, "n": 2}}),
    _generate("stop token", {"input_ids": PROMPT, "sampling_params": {"stop_token_ids": [*range(512)]}}),
    _generate("stop token that is ignored", {
        "input_ids": PROMPT, "sampling_params": {**SHORT, "stop_token_ids": [*range(512)]},
    }),
    _generate("rollout parameters", {
        "input_ids": PROMPT,
        "return_logprob": True,
        "sampling_params": {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 4, "stop": None, "stop_token_ids": None,
            "skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False,
            "ignore_eos": True,
        },
    }),
    _generate("unknown field", {"input_ids": PROMPT, "sampling_params": SHORT, "no_such_field": 1}),
)  # fmt: skip

STREAMS = (
    _generate("stream", {"input_ids": PROMPT, "stream": True, "sampling_params": SHORT}),
    _generate("stream with logprobs", {"input_ids": PROMPT, "stream": True, "sampling_params": SHORT, **LOGPROBS}),
    _generate("stream of a batch", {"input_ids": [PROMPT, PROMPT[:3]], "stream": True, "sampling_params": SHORT}),
    _generate("stream of a score", {
        "input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
        "logprob_start_len": 0,
    }),
    _generate("stream that is refused", {"input_ids": PROMPT, "stream": True, "sampling_params": {"top_p": 7}}),
    _generate("stream that does not validate", {"input_ids": {"a": 1}, "stream": True}),
    _post("chat stream", "/v1/chat/completions", {**OPEN, "stream": True}),
    _post(
        "chat stream with usage",
        "/v1/chat/completions",
        {**OPEN, "stream": True, "stream_options": {"include_usage": True}},
    ),
    _post(
        "chat stream with logprobs",
        "/v1/chat/completions",
        {**OPEN, "stream": True, "logprobs": True, "top_logprobs": 2},
    ),
    _post("chat stream that is refused", "/v1/chat/completions", {**OPEN, "stream": True, "messages": []}),
    _post("chat stream with a bad value", "/v1/chat/completions", {**OPEN, "stream": True, "top_p": 7}),
    _post("completion stream", "/v1/completions", {**COMPLETION, "stream": True}),
    _post(
        "completion stream with usage",
        "/v1/completions",
        {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}},
    ),
    _post("completion stream with echo", "/v1/completions", {**COMPLETION, "stream": True, "echo": True}),
)  # fmt: skip

OPENAI = (
    _post("chat", "/v1/chat/completions", OPEN),
    _post("chat with an unknown model", "/v1/chat/completions", {**OPEN, "model": "nobody"}),
    _post("chat without a model", "/v1/chat/completions", {key: OPEN[key] for key in OPEN if key != "model"}),
    _post("chat with logprobs", "/v1/chat/completions", {**OPEN, "logprobs": True, "top_logprobs": 2}),
    _post("chat with plain logprobs", "/v1/chat/completions", {**OPEN, "logprobs": True}),
    _post("chat with several answers", "/v1/chat/completions", {**OPEN, "n": 2}),
    _post("chat in parts", "/v1/chat/completions", {
        **OPEN, "messages": [
            {"role": "system", "content": "be short"}, {"role": "user", "content": [{"type": "text", "text": TEXT}]},
        ],
    }),
    _post("completion", "/v1/completions", COMPLETION),
    _post("completion of ids", "/v1/completions", {**COMPLETION, "prompt": PROMPT}),
    _post("completion of several", "/v1/completions", {**COMPLETION, "prompt": [TEXT, TEXT]}),
    _post("completion of several ids", "/v1/completions", {**COMPLETION, "prompt": [PROMPT, PROMPT]}),
    _post("completion with logprobs", "/v1/completions", {**COMPLETION, "logprobs": 2}, loose=TOKENS),
    _post("completion with echo", "/v1/completions", {**COMPLETION, "echo": True}),
    _post("completion with several answers", "/v1/completions", {**COMPLETION, "n": 2}),
)  # fmt: skip

REFUSED = (
    _generate("negative temperature", {"input_ids": PROMPT, "sampling_params": {"temperature": -1}}),
    _generate("top_p above one", {"input_ids": PROMPT, "sampling_params": {"top_p": 7}}),
    _generate("top_p of zero", {"input_ids": PROMPT, "sampling_params": {"top_p": 0}}),
    _generate("top_k of zero", {"input_ids": PROMPT, "sampling_params": {"top_k": 0}}),
    _generate("negative length", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}}),
    _generate("no copies", {"input_ids": PROMPT, "sampling_params": {**SHORT, "n": 0}}),
    _generate("unknown parameter", {"input_ids": PROMPT, "sampling_params": {"no_such_parameter": 1}}),
    _generate("parameters that are a number", {"input_ids": PROMPT, "sampling_params": 3}),
    _generate("parameters in a list without a batch", {"input_ids": PROMPT, "sampling_params": [SHORT]}),
    _generate(
        "log-prob of a token outside the vocabulary",
        {"input_ids": PROMPT, "sampling_params": SHORT, "return_logprob": True, "token_ids_logprob": [99_999_999]},
    ),
    _generate("stream with an unknown parameter", {"input_ids": PROMPT, "stream": True, "sampling_params": {"x": 1}}),
    _generate("temperature that is text", {"input_ids": PROMPT, "sampling_params": {"temperature": "warm"}}),
    _generate("stop that is a number", {"input_ids": PROMPT, "sampling_params": {"stop": 3}}),
    _generate("no prompt", {"sampling_params": SHORT}),
    _generate("two prompts", {"input_ids": PROMPT, "text": TEXT, "sampling_params": SHORT}),
    _generate("empty ids", {"input_ids": [], "sampling_params": SHORT}),
    _generate("empty batch of texts", {"text": [], "sampling_params": SHORT}),
    _generate("text that is a mapping", {"text": {"not": "text"}}),
    _generate("ids that are text", {"input_ids": "7 8 9"}),
    _generate("ids that are fractions", {"input_ids": [1.5, 2.5], "sampling_params": SHORT}),
    _generate("request id that is a number", {"input_ids": PROMPT, "rid": 3, "sampling_params": SHORT}),
    _generate("request ids that are too few", {"input_ids": [PROMPT, PROMPT], "rid": ["a"], "sampling_params": SHORT}),
    _generate("request ids twice", {"input_ids": [PROMPT, PROMPT], "rid": ["a", "a"], "sampling_params": SHORT}),
    _generate("prompt above the context", {"input_ids": [7] * 40_000, "sampling_params": SHORT}),
    _generate("length above the context", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 100_000}}),
    _generate(
        "logprob start beyond the prompt",
        {"input_ids": PROMPT, "sampling_params": SHORT, "return_logprob": True, "logprob_start_len": 99},
    ),
    _generate(
        "logprob start that is text",
        {"input_ids": PROMPT, "sampling_params": SHORT, "return_logprob": True, "logprob_start_len": "all"},
    ),
    _generate("stream that is text", {"input_ids": PROMPT, "stream": "perhaps"}),
    _generate("half a body", b"{", headers=JSON_HEADER),
    _generate("no body", b"", headers=JSON_HEADER),
    _generate("body that is a list", [1, 2]),
    _generate("body that is null", b"null", headers=JSON_HEADER),
    _generate("body of another kind", b'{"text": "2 + 3"}', headers={"content-type": "text/plain"}),
    _post("chat without messages", "/v1/chat/completions", {"model": "policy"}),
    _post("chat with no message", "/v1/chat/completions", {**CHAT, "messages": []}),
    _post("chat with an unknown part", "/v1/chat/completions", {**CHAT, "messages": [{"content": "x"}]}),
    _post("chat with messages that are text", "/v1/chat/completions", {**CHAT, "messages": "hello"}),
    _post("chat with a bad top_p", "/v1/chat/completions", {**CHAT, "top_p": 7}),
    _post("chat with a bad temperature", "/v1/chat/completions", {**CHAT, "temperature": -1}),
    _post("chat with no answers", "/v1/chat/completions", {**CHAT, "n": 0}),
    _post("chat with a length above the context", "/v1/chat/completions", {**CHAT, "max_tokens": 100_000}),
    _post("half a chat", "/v1/chat/completions", b"{", headers=JSON_HEADER),
    _post("chat of another kind", "/v1/chat/completions", b"{}", headers={"content-type": "text/plain"}),
    _post("completion without a prompt", "/v1/completions", {"model": "policy"}),
    _post("completion of nothing", "/v1/completions", {**COMPLETION, "prompt": ""}),
    _post("completion of no ids", "/v1/completions", {**COMPLETION, "prompt": []}),
    _post("completion with a bad top_p", "/v1/completions", {**COMPLETION, "top_p": 7}),
    _get("generate by GET", "/generate"),
    _get("a route that is not there", "/no/such/route"),
    _get("the route of old loads", "/get_load"),
    _get("metrics that are off", "/metrics"),
    _get("pause by GET", "/pause_generation"),
)  # fmt: skip

INFORMATION = (
    _get("model_info", "/model_info", only_known=True, loose=frozenset({"architectures"})),
    _get("get_model_info", "/get_model_info", only_known=True, loose=frozenset({"architectures"})),
    _get("server_info", "/server_info", only_known=True, loose=frozenset({"internal_states", "startup_time"})),
    _get("get_server_info", "/get_server_info", only_known=True, loose=frozenset({"internal_states", "startup_time"})),
    _get("loads", "/v1/loads", only_known=True, loose=frozenset({"accelerator"})),
    _get("models", "/v1/models"),
    _get("one model", "/v1/models/policy"),
    _get("a model that is not there", "/v1/models/nobody"),
    _get("ready", "/ready"),
    _get("health", "/health"),
    _get("health by generation", "/health_generate"),
    _get("ping", "/ping"),
)

CONTROL = (
    _post("flush", "/flush_cache", None),
    _get("flush by GET", "/flush_cache"),
    _post("abort all", "/abort_request", {"abort_all": True}),
    _post("abort one that is not there", "/abort_request", {"rid": "golden-nobody"}),
    _post("abort nothing", "/abort_request", {}),
    _post("abort without a body", "/abort_request", b"", headers=JSON_HEADER),
    _post("abort with half a body", "/abort_request", b"{", headers=JSON_HEADER),
    _post("pause", "/pause_generation", {}, after=(("/continue_generation", {}),)),
    _post("pause in place", "/pause_generation", {"mode": "in_place"}, after=(("/continue_generation", {}),)),
    _post("pause by retraction", "/pause_generation", {"mode": "retract"}, after=(("/continue_generation", {}),)),
    _post("pause in no known mode", "/pause_generation", {"mode": "nap"}),
    _post("pause without a body", "/pause_generation", b"", headers=JSON_HEADER),
    _post("continue", "/continue_generation", {}),
    _post("continue without a body", "/continue_generation", b"", headers=JSON_HEADER),
    _post("release", "/release_memory_occupation", {}, after=(("/resume_memory_occupation", {}),)),
    _post(
        "release of one tag",
        "/release_memory_occupation",
        {"tags": ["kv_cache"]},
        after=(("/resume_memory_occupation", {"tags": ["kv_cache"]}),),
    ),
    _post("release of no known tag", "/release_memory_occupation", {"tags": ["nothing"]}),
    _post("release without a body", "/release_memory_occupation", b"", headers=JSON_HEADER),
    _post("release of text", "/release_memory_occupation", {"tags": "weights"}),
    _post("resume without a body", "/resume_memory_occupation", b"", headers=JSON_HEADER),
    _post("update from nowhere", "/update_weights_from_disk", {"model_path": "/no/such/checkpoint"}),
    _post("update without a path", "/update_weights_from_disk", {}),
    _post("version", "/update_weight_version", {"new_version": "9"}, after=OLD_VERSION),
    _post("version that is a number", "/update_weight_version", {"new_version": 9}),
    _post("version without a value", "/update_weight_version", {}),
    _post("checksum", "/weights_checker", {"action": "checksum"}, loose=frozenset({"ranks"})),
    _post("checksum by default", "/weights_checker", None, loose=frozenset({"ranks"})),
    _post("unknown check", "/weights_checker", {"action": "guess"}),
    _post("group without an address", "/init_weights_update_group", {}),
    _post("end of a group that is not there", "/destroy_weights_update_group", {"group_name": "nobody"}),
    _post("distributed update without names", "/update_weights_from_distributed", {}),
    _post("tensor update without tensors", "/update_weights_from_tensor", {}),
)  # fmt: skip

GROUPS: dict[str, tuple[Exchange, ...]] = {
    "generate": GENERATE,
    "streams": STREAMS,
    "openai": OPENAI,
    "refused": REFUSED,
    "information": INFORMATION,
    "control": CONTROL,
}


# ---- asking --------------------------------------------------------------------------------------------------------


def ask(engine: Launched, exchange: Exchange) -> dict[str, Any]:
    """The recording of one exchange, normalised. What it changed is put right again."""
    engine.flush()  # answers depend on what is in the cache
    body = exchange.body
    if isinstance(body, bytes):
        answer = engine.http.request(exchange.method, exchange.path, content=body, headers=exchange.headers)
    elif body is None:
        answer = engine.http.request(exchange.method, exchange.path, headers=exchange.headers)
    else:
        answer = engine.http.request(exchange.method, exchange.path, json=body, headers=exchange.headers)
    for path, back in exchange.after:
        assert engine.post(path, back).status_code == 200
    kind = answer.headers.get("content-type", "")
    recording: dict[str, Any] = {"status": answer.status_code, "content_type": kind}
    if kind.startswith("text/event-stream"):
        blocks = answer.content.decode().split("\n\n")
        assert blocks[-1] == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
        recording["events"] = [
            normalised(_event(block.removeprefix("data: ")), exchange.loose) for block in blocks[:-1]
        ]
    elif kind.startswith("application/json"):
        recording["body"] = normalised(answer.json(), exchange.loose)
    else:
        recording["text"] = answer.text[:200]
    return recording


def _event(data: str) -> Any:
    return data if data == "[DONE]" else json.loads(data)


_MACHINE = re.compile(r"/(?:[\w.@+-]+/)+[\w.@+-]+")
_MEASURED = re.compile(r"^created$|^timestamp$|port$|pid$|latency|time|throughput|_gb$|memory|seed")
_LONG = 400


def normalised(value: Any, loose: Iterable[str] = (), key: str = "") -> Any:
    """`value` without what changes from run to run or machine to machine: ids, times, folders, ports."""
    if key in loose:
        return "<any>"
    if isinstance(value, Mapping):
        return {name: normalised(item, loose, name) for name, item in value.items()}
    if isinstance(value, list):
        return [normalised(item, loose, key) for item in value]
    if isinstance(value, str):
        if key in {"id", "timestamp"} and not value.startswith("golden-"):
            return f"<{key}>"
        return _MACHINE.sub("<path>", value)[:_LONG]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if _MEASURED.search(key):
        return type(value)(0)
    return round(value, 1) if isinstance(value, float) else value


# ---- comparing -----------------------------------------------------------------------------------------------------


def shape(value: Any, loose: Iterable[str] = ()) -> Any:
    """Names, kinds and nesting of a recording."""
    if isinstance(value, Mapping):
        return {name: "any" if name in loose else shape(value[name], loose) for name in sorted(value)}
    if isinstance(value, list):
        kinds: list[Any] = []
        for item in value:
            kind = shape(item, loose)
            if kind not in kinds:
                kinds.append(kind)
        return kinds
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return "text"


def compared(recording: Mapping[str, Any], loose: Iterable[str]) -> dict[str, Any]:
    """What two recordings of one exchange must have in common."""
    out: dict[str, Any] = {"status": recording["status"], "content_type": recording["content_type"]}
    if "body" in recording:
        out["body"] = shape(recording["body"], loose)
    if "events" in recording:
        *events, end = recording["events"]
        out |= {"first": shape(events[0], loose), "last": shape(events[-1], loose), "end": end}
        # How many tokens come in one event is a matter of speed, so of those in between only their kind counts.
        out["between"] = shape(events, loose)
    return out


def differences(want: Any, seen: Any, *, only_known: bool = False, at: str = "") -> list[str]:
    """Where `seen` is not `want`, one sentence each; with `only_known` a missing field is none."""
    if isinstance(want, Mapping) and isinstance(seen, Mapping):
        out = [f"{at}: {name} is invented" for name in sorted(seen.keys() - want.keys())]
        if not only_known or not at:
            out += [f"{at}: {name} is missing" for name in sorted(want.keys() - seen.keys())]
        for name in sorted(want.keys() & seen.keys()):
            if name == "between" and not at:
                out += [f"an event like {event} is invented" for event in seen[name] if event not in want[name]]
                continue
            out += differences(want[name], seen[name], only_known=only_known, at=f"{at}.{name}")
        return out
    if isinstance(want, list) and isinstance(seen, list) and len(want) == len(seen):
        pairs = enumerate(zip(want, seen, strict=True))
        return [
            line
            for index, (left, right) in pairs
            for line in differences(left, right, only_known=only_known, at=f"{at}[{index}]")
        ]
    return [] if want == seen else [f"{at}: is {seen}, wanted {want}"]


# ---- files ---------------------------------------------------------------------------------------------------------


def read(group: str) -> dict[str, Any]:
    """What was recorded of a group: exchange to recording."""
    document = json.loads((GOLDEN / f"{group}.json").read_text(encoding="utf-8"))
    exchanges: dict[str, Any] = document["exchanges"]
    return exchanges


def write(group: str, version: str, recordings: Mapping[str, Any]) -> None:
    """Put recordings of a real engine on file."""
    GOLDEN.mkdir(exist_ok=True)
    document = {"recorded_from": f"sglang {version}", "exchanges": dict(recordings)}
    text = json.dumps(document, indent=1, ensure_ascii=True)
    (GOLDEN / f"{group}.json").write_text(text + "\n", encoding="utf-8")
