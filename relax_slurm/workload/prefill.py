"""Scoring by prefill: how likely a model finds a response that is there already. Request and answer, both pure.

`logprob_start_len` is P - 1, so that an answer holds R + 1 values: the first one belongs to the last prompt token and
is dropped, R are kept. The four selections say whose candidates are compared:

| selection | asked of the teacher | asked of the student |
|---|---|---|
| student_sampled | the tokens of the response | nothing |
| student_topk | the student's candidates while it wrote | nothing |
| teacher_topk | its own candidates | the teacher's candidates |
| union | both | the teacher's candidates |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from relax_slurm.workload import engine_answer as answers
from relax_slurm.workload.samples import Sample

WINDOW = 256
"""Response positions per request when chosen ids are asked for: an engine tells every asked id at every position, so
that the answer grows with the square of the window."""


class Selection(StrEnum):
    """Whose tokens are compared (docs/batches.md, Teacher)."""

    STUDENT_SAMPLED = "student_sampled"
    STUDENT_TOPK = "student_topk"
    TEACHER_TOPK = "teacher_topk"
    UNION = "union"

    @property
    def student_candidates(self) -> bool:
        """Whether the policy's own candidates are kept while it writes, and the teacher is asked for them."""
        return self in (Selection.STUDENT_TOPK, Selection.UNION)

    @property
    def teacher_candidates(self) -> bool:
        """Whether the teacher tells candidates of its own."""
        return self in (Selection.TEACHER_TOPK, Selection.UNION)

    def fields(self, student: bool) -> frozenset[str]:
        """What the stages write per token; `student`: the student is asked too."""
        found = {"teacher_log_probs"}
        if self.student_candidates:
            found.add("teacher_at_student_topk_log_probs")
        if self.teacher_candidates:
            found |= {"teacher_topk_token_ids", "teacher_topk_log_probs"}
            if student:
                found.add("student_at_teacher_topk_log_probs")
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class Window:
    """Response positions `start` to `end` (exclusive)."""

    start: int
    end: int


@dataclass(slots=True)
class Scores:
    """What one model says of one response."""

    log_probs: list[float]
    top_ids: list[list[int]] | None = None
    top_log_probs: list[list[float]] | None = None
    chosen: list[list[float]] | None = None


def windows(length: int, narrow: bool) -> Iterator[Window]:
    """One window for all, or several narrow ones."""
    step = WINDOW if narrow else max(length, 1)
    for start in range(0, length, step):
        yield Window(start, min(start + step, length))


def request(
    tokens: Sequence[int], prompt_length: int, window: Window, top_k: int, chosen: Sequence[Sequence[int]] | None
) -> dict[str, Any]:
    """The `/generate` body that scores one window of a response."""
    body: dict[str, Any] = {
        "input_ids": list(tokens[: prompt_length + window.end]),
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": max(prompt_length + window.start - 1, 0),
    }
    if top_k:
        body["top_logprobs_num"] = top_k
    if chosen is not None:
        body["token_ids_logprob"] = sorted({token for row in chosen[window.start : window.end] for token in row})
    return body


def read(
    answer: Any,
    tokens: Sequence[int],
    prompt_length: int,
    window: Window,
    top_k: int,
    chosen: Sequence[Sequence[int]] | None,
) -> Scores:
    """The scores of one window. ValueError when a value is missing, ill-shaped, not finite or about another token."""
    meta = answers.meta_of(answer)
    length = window.end - window.start

    def kept(name: str) -> list[Any]:
        rows = answers.rows_of(meta, name)
        if len(rows) != length + 1:
            raise ValueError(f"{name} has {len(rows)} values, wanted {length + 1} ({length} and one to drop)")
        return rows[1:]

    wanted = tokens[prompt_length + window.start : prompt_length + window.end]
    name = "input_token_logprobs"
    scores = Scores(answers.log_probs(kept(name), name, wanted))
    if top_k:
        name = "input_top_logprobs"
        scores.top_ids, scores.top_log_probs = answers.top_rows(kept(name), name, length, top_k)
    if chosen is not None:
        name = "input_token_ids_logprobs"
        scores.chosen = answers.chosen_rows(kept(name), name, chosen[window.start : window.end])
    return scores


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of consecutive windows as one."""
    whole = Scores([value for part in parts for value in part.log_probs])
    for name in ("top_ids", "top_log_probs", "chosen"):
        if parts and getattr(parts[0], name) is not None:
            setattr(whole, name, [row for part in parts for row in getattr(part, name)])
    return whole


def read_by_teacher(sample: Sample) -> tuple[list[int], int]:
    """Tokens that the teacher reads, and how many of them are prompt.

    `teacher_tokens` stands in for the sample's own when the teacher reads another prompt; the response ends both.
    """
    tokens = sample.tokens if sample.teacher_tokens is None else sample.teacher_tokens
    return tokens, len(tokens) - sample.response_length
