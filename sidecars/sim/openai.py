"""The OpenAI-shaped routes: a chat or completion body becomes sequences, their results become OpenAI JSON.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecars.sim import tokenizer
from sidecars.sim.protocol import Invalid, Item, Limits, Logprobs, Sampling, check_length, parse_sampling


@dataclass(frozen=True, slots=True)
class Completion:
    """One request on an OpenAI route."""

    items: tuple[Item, ...]
    model: str
    stream: bool
    include_usage: bool
    chat: bool
    echo: str = ""
    """Text that goes before every choice (completions with `echo`)."""


def parse(body: Any, limits: Limits, fresh: str, served: str, *, chat: bool) -> Completion:
    """A chat or completion body. Any model name is accepted: telling models apart is the gateway's
    business.
    """
    if not isinstance(body, Mapping):
        raise Invalid("the body must be a JSON object", validation=True)
    prompt = _chat_prompt(body) if chat else _completion_prompt(body)
    sampling = _sampling(body, chat=chat)
    count = body.get("n", 1)
    if type(count) is not int or not 1 <= count <= 128:
        raise Invalid(f"n: Input should be an integer from 1 to 128, got {count!r}", validation=True)
    options = body.get("stream_options")
    usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
    check_length(prompt, sampling.max_new_tokens, limits)
    logprobs = _logprobs(body, len(prompt), chat=chat)
    items = tuple(
        Item(fresh if count == 1 else f"{fresh}{index:04x}", prompt, _seeded(sampling, index), logprobs)
        for index in range(count)
    )
    model = body.get("model")
    echo = tokenizer.decode(prompt) if not chat and body.get("echo") else ""
    return Completion(items, model if isinstance(model, str) else served, bool(body.get("stream")), usage, chat, echo)


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


def _completion_prompt(body: Mapping[str, Any]) -> tuple[int, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise Invalid("prompt: Input should be a valid string or a list of integers", validation=True)


def _sampling(body: Mapping[str, Any], *, chat: bool) -> Sampling:
    longest = body.get("max_completion_tokens") if chat else None
    if longest is None:
        longest = body.get("max_tokens")
    keys = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim")
    params = {key: body[key] for key in (*keys, "skip_special_tokens") if key in body}
    params["max_new_tokens"] = longest
    params["sampling_seed"] = body.get("seed")
    return parse_sampling(params, None if chat else 16)


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


def _logprobs(body: Mapping[str, Any], prompt_length: int, *, chat: bool) -> Logprobs | None:
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    top = body.get("top_logprobs") or 0 if chat else int(wanted)
    if type(top) is not int or not 0 <= top <= 64:
        raise Invalid(f"top_logprobs: Input should be an integer from 0 to 64, got {top!r}", validation=True)
    return Logprobs(prompt_length, top, None, with_text=True)


def usage(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Token counts over all choices; the prompt counts once."""
    metas = [result["meta_info"] for result in results]
    prompt = metas[0]["prompt_tokens"]
    completion = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
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
        "usage": usage(results),
        "metadata": {"weight_version": first["weight_version"]},
    }


def _choice(request: Completion, index: int, result: Mapping[str, Any]) -> dict[str, Any]:
    finish = result["meta_info"]["finish_reason"]
    choice: dict[str, Any] = {"index": index}
    if request.chat:
        choice["message"] = {"role": "assistant", "content": result["text"], "reasoning_content": None}
    else:
        choice["text"] = request.echo + result["text"]
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
        "text_offset": [],
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
        if not self._begun:
            self._begun = True
            if chat:
                yield self._chunk(meta, {"role": "assistant", "content": "", "reasoning_content": None})
            elif self._request.echo:
                yield self._chunk(meta, self._request.echo)
        fresh = result["text"][self._sent_text :]
        self._sent_text += len(fresh)
        logprobs = logprobs_of(self._request, meta, self._sent_tokens)
        self._sent_tokens = meta["completion_tokens"]
        if fresh:
            delta = {"role": None, "content": fresh, "reasoning_content": None} if chat else fresh
            yield self._chunk(meta, delta, logprobs)
        if meta["finish_reason"] is not None:
            empty = {"role": None, "content": None, "reasoning_content": None} if chat else ""
            yield self._chunk(meta, empty, finish=meta["finish_reason"])

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
    """One chunk; the last one of a stream with usage has no choices."""
    kind = "chat.completion.chunk" if request.chat else "text_completion"
    return {
        "id": rid,
        "object": kind,
        "created": created,
        "model": request.model,
        "choices": choices,
        "usage": total,
    }
