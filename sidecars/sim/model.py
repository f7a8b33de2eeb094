"""The pretended model: which tokens follow a prompt, and how likely every token was. Pure and deterministic.

A log-probability depends on the weights, the two tokens before and the token itself, and on nothing else. So
the value a policy reports while it generates is the value any engine with the same weights reports when it
scores that text later, and the probabilities of the whole vocabulary add up to one at every position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from sidecars.sim import answers, tokenizer
from sidecars.sim.protocol import Logprobs, Sampling

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Weights:
    """What is loaded. `garbled` weights are resident but were never filled again after a release."""

    path: str
    version: str
    fingerprint: int
    garbled: bool = False

    @property
    def key(self) -> int:
        """Seed of everything the weights decide."""
        return self.fingerprint ^ (0x5BD1E995 if self.garbled else 0)


def fingerprint(*parts: object) -> int:
    """64 bits that stand for the content of weights."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "replace")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Run:
    """The whole future of one sequence; a stream shows it bit by bit."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    finish: dict[str, Any]
    visible: int
    """Number of leading output tokens that make up the text; the rest is what stopped it."""


class Model:
    """Answers and log-probs of one role with a seed."""

    def __init__(self, role: str, seed: int, error_rate: float, vocab_size: int, context_length: int) -> None:
        self._role = role
        self._seed = seed
        self._error_rate = error_rate
        self._vocab = vocab_size
        self._context = context_length

    def run(self, prompt: Sequence[int], sampling: Sampling, weights: Weights) -> Run:
        """Decide the output of `prompt`."""
        room = self._context - len(prompt)
        longest = room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)
        tokens = self._tokens(prompt, sampling, weights, longest)
        stops = frozenset() if sampling.ignore_eos else sampling.stop_token_ids | {tokenizer.EOS}
        for index, token in enumerate(tokens):
            if token in stops:
                finish = {"type": "stop", "matched": token}
                visible = index + 1 if sampling.no_stop_trim else index
                return Run(tuple(prompt), tuple(tokens[: index + 1]), finish, visible)
            for stop in sampling.stop:
                raw = stop.encode()
                if tokens[max(0, index + 1 - len(raw)) : index + 1] == list(raw):
                    end = index + 1
                    kept = end if sampling.no_stop_trim else end - len(raw)
                    return Run(tuple(prompt), tuple(tokens[:end]), {"type": "stop", "matched": stop}, max(kept, 0))
        length = {"type": "length", "length": len(tokens)}
        return Run(tuple(prompt), tuple(tokens), length, len(tokens))

    def _tokens(self, prompt: Sequence[int], sampling: Sampling, weights: Weights, longest: int) -> list[int]:
        if longest <= 0:
            return []
        text = tokenizer.decode(prompt)
        seed = (self._seed, weights.key, text, sampling.seed)
        said = self._said(text, weights, seed)
        tokens = tokenizer.encode(said)
        if sampling.ignore_eos or not said:
            limit = longest if sampling.ignore_eos else 8 + int(answers.unit("length", *seed) * 56)
            filler = answers.words("words", *seed)
            while len(tokens) < limit:
                tokens += tokenizer.encode(" " + next(filler))
            tokens = tokens[:limit]
        return [*tokens, tokenizer.EOS][:longest]

    def _said(self, text: str, weights: Weights, seed: tuple[object, ...]) -> str:
        if weights.garbled:
            return "".join(chr(33 + int(answers.unit("garbled", index, *seed) * 15)) for index in range(12))
        if self._role == "genrm":
            return answers.grade(text)
        solved = answers.solve(text) if self._role == "rollout" else None
        if solved is None:
            return ""
        if answers.unit("wrong?", *seed) < self._error_rate:
            return answers.wrong(solved, answers.unit("how", *seed))
        return solved

    # ---- log-probabilities
    # -------------------------------------------------------------------------------------

    def logprob(self, weights: Weights, tokens: Sequence[int], position: int) -> float:
        """Log-probability of `tokens[position]` given what stands before it."""
        scale, shift = self._place(weights, tokens, position)
        return _table(self._vocab)[(scale * tokens[position] + shift) & (self._vocab - 1)]

    def top(self, weights: Weights, tokens: Sequence[int], position: int, count: int) -> list[tuple[float, int]]:
        """The `count` likeliest tokens at `position`, best first."""
        scale, shift = self._place(weights, tokens, position)
        back = pow(scale, -1, self._vocab)
        table = _table(self._vocab)
        return [(table[rank], (back * (rank - shift)) & (self._vocab - 1)) for rank in range(count)]

    def of(self, weights: Weights, tokens: Sequence[int], position: int, ids: Sequence[int]) -> list[tuple[float, int]]:
        """Log-probabilities of chosen tokens at `position`."""
        scale, shift = self._place(weights, tokens, position)
        table = _table(self._vocab)
        return [(table[(scale * token + shift) & (self._vocab - 1)], token) for token in ids]

    def _place(self, weights: Weights, tokens: Sequence[int], position: int) -> tuple[int, int]:
        # An odd factor modulo a power of two permutes the vocabulary: every token gets a rank of its own.
        before = tokens[position - 1] if position > 0 else 0
        earlier = tokens[position - 2] if position > 1 else 0
        mixed = (weights.key ^ (before * 0x9E3779B97F4A7C15) ^ (earlier * 0xC2B2AE3D27D4EB4F)) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
        return (mixed | 1) & (self._vocab - 1), (mixed >> 32) & (self._vocab - 1)

    def describe(self, run: Run, weights: Weights, wanted: Logprobs, produced: int) -> dict[str, Any]:
        """The log-prob fields of meta_info after `produced` output tokens."""
        tokens = run.prompt + run.output[:produced]
        border = len(run.prompt)

        def one(pair: tuple[float, int]) -> list[Any]:
            return [pair[0], pair[1], tokenizer.token_text(pair[1]) if wanted.with_text else None]

        def row(position: int) -> list[Any]:
            return one((self.logprob(weights, tokens, position), tokens[position]))

        inputs, outputs = range(wanted.start, border), range(border, len(tokens))
        # Without a token to generate, the candidates for the first one are told all the same.
        looked_at = outputs or range(border, border + 1)
        first = [[None, *row(position)[1:]] for position in inputs[:1]]
        out: dict[str, Any] = {
            "input_token_logprobs": first + [row(position) for position in inputs[1:]],
            "output_token_logprobs": [row(position) for position in outputs],
            "output_token_logprobs_length": len(outputs),
        }
        empty: list[Any] = [None] * len(inputs[:1])
        if wanted.top > 0:

            def best(position: int) -> list[Any]:
                return [one(pair) for pair in self.top(weights, tokens, position, wanted.top)]

            out["input_top_logprobs"] = empty + [best(position) for position in inputs[1:]]
            out["output_top_logprobs"] = [best(position) for position in looked_at]
        if wanted.token_ids is not None:
            ids = wanted.token_ids

            def chosen(position: int) -> list[Any]:
                return [one(pair) for pair in self.of(weights, tokens, position, ids)]

            out["input_token_ids_logprobs"] = empty + [chosen(position) for position in inputs[1:]]
            out["output_token_ids_logprobs"] = [chosen(position) for position in looked_at]
        return out


@lru_cache(maxsize=4)
def _table(vocab: int) -> tuple[float, ...]:
    """Log-probability by rank: a power law, normalised."""
    weights = [1.0 / (rank + 1) ** 1.6 for rank in range(vocab)]
    total = math.fsum(weights)
    return tuple(math.log(weight / total) for weight in weights)
