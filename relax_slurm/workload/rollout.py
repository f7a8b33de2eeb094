"""Generates groups of samples with the policy, so many at a time, and hands over every group that is whole.

A prompt given as text is read by the engine once (a request that generates nothing); its ids are what all samples of
the group are asked with, so that they share the engine's cache, and what teacher and student read later. Requests of a
group carry the same X-SMG-Routing-Key. Nothing is sent twice: a sample whose request failed is FAILED.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Protocol

from relax_slurm.core.plan import Role
from relax_slurm.errors import RelaxError
from relax_slurm.workload import engine_answer as answers
from relax_slurm.workload.failures import IncompleteGroup
from relax_slurm.workload.samples import FINISHED, Group, Prompt, Sample, SampleStatus, check_group

TAG_CHARACTERS, NUMBER_CHARACTERS = 16, 16
"""A request's id is the batch's tag and its own number, all of one length: an engine that is told to end one ends every
request whose id begins with it."""
ALWAYS: dict[str, Any] = {"no_stop_trim": True, "spaces_between_special_tokens": False}
"""Sampling parameters without which the text would not be that of the ids."""
_FINISH = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}


class Engines(Protocol):
    """What is needed of `InferenceClient`."""

    async def generate(
        self,
        payload: dict[str, Any],
        role: Role,
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity_key: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """One `/generate`."""

    async def abort(self, rids: Sequence[str], role: Role) -> int:
        """End requests by their ids."""


class Transfer(Protocol):
    """Where groups go."""

    def put(self, group: Group) -> None:
        """Take one group."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How a batch is generated."""

    samples_per_prompt: int = 4
    concurrency: int = 256
    """Requests in flight."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """SGLang's sampling parameters."""
    top_k: int = 0
    """Candidates of the policy to keep per position; 0 keeps none."""
    model: str | None = None
    """Policy model; None takes the role's default."""
    seed: int | None = None
    """Sampling seed of the run; every sample has one of its own. None leaves it to the engine."""
    timeout_seconds: float = 1800.0
    """Of one request."""
    complete_groups: bool = True
    """Refuse groups with unfinished samples. False marks those samples as removed instead."""


class RolloutWorkload:
    """Makes groups. One batch at a time; numbers of groups and samples go on from batch to batch."""

    def __init__(
        self,
        engines: Engines,
        settings: RolloutSettings,
        *,
        first_group: int = 0,
        new_tag: Callable[[], str] = lambda: token_hex(TAG_CHARACTERS // 2),
    ) -> None:
        self._engines = engines
        self._settings = settings
        self._groups = itertools.count(first_group)
        self._samples = itertools.count(first_group * settings.samples_per_prompt)
        self._new_tag = new_tag
        self._tag = ""
        self._numbers: Iterator[int] = iter(())
        self._running: set[str] = set()
        self._aborted = False

    async def generate(self, prompts: Sequence[Prompt], transfer: Transfer, wanted: int | None = None) -> int:
        """Make a group per prompt and hand each over; the number of groups handed over.

        With fewer `wanted` than prompts (oversampling) the first whole groups are taken, the rest is aborted and
        dropped. IncompleteGroup when fewer whole groups come about than wanted. Cancelling ends the engines' work too.
        """
        wanted = len(prompts) if wanted is None else min(wanted, len(prompts))
        self._tag, self._numbers, self._aborted = self._new_tag(), itertools.count(), False
        gate = asyncio.Semaphore(self._settings.concurrency)
        tasks = [asyncio.ensure_future(self._group(prompt, next(self._groups), gate)) for prompt in prompts]
        taken, refusals = 0, []
        try:
            for task in asyncio.as_completed(tasks):
                group = await task
                try:
                    self._accept(group)
                except IncompleteGroup as refusal:
                    refusals.append(refusal)
                    if len(prompts) - len(refusals) < wanted:
                        raise
                    continue
                transfer.put(group)
                taken += 1
                if taken == wanted:
                    break
        finally:
            if not all(task.done() for task in tasks):
                await self._give_up(tasks)
        return taken

    async def abort(self) -> None:
        """End the batch that is being made: what runs is answered as far as it is, and nothing more is sent."""
        self._aborted = True
        if self._running:
            await self._engines.abort(sorted(self._running), Role.ROLLOUT)

    def _accept(self, group: Group) -> None:
        if self._settings.complete_groups:
            check_group(group, self._settings.samples_per_prompt)
            return
        for sample in group:
            sample.remove_sample = sample.remove_sample or sample.status not in FINISHED

    async def _give_up(self, tasks: Sequence[asyncio.Future[Group]]) -> None:
        self._aborted = True
        rids = sorted(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if rids:
                await self._engines.abort(rids, Role.ROLLOUT)
        except RelaxError:
            return  # their connections are closed, which ends them a little later

    async def _group(self, prompt: Prompt, number: int, gate: asyncio.Semaphore) -> Group:
        samples = [self._sample(prompt, number) for _ in range(self._settings.samples_per_prompt)]
        try:
            ids = list(prompt.input_ids) if prompt.input_ids is not None else await self._read(prompt, number, gate)
        except (RelaxError, ValueError) as error:
            for sample in samples:
                _fail(sample, error)
            return samples
        await asyncio.gather(*(self._fill(sample, prompt, ids, gate) for sample in samples))
        return samples

    def _sample(self, prompt: Prompt, number: int) -> Sample:
        return Sample(
            number,
            next(self._samples),
            prompt=prompt.text,
            label=prompt.label,
            metadata=dict(prompt.metadata),
            multimodal_inputs=prompt.multimodal,
        )

    async def _read(self, prompt: Prompt, number: int, gate: asyncio.Semaphore) -> list[int]:
        """The engine's own ids of a text."""
        body: dict[str, Any] = {
            "text": prompt.text,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **(prompt.multimodal or {}),
        }
        meta = answers.meta_of(await self._ask(body, number, gate))
        ids = answers.ids_of(answers.rows_of(meta, "input_token_logprobs"), "input_token_logprobs")
        if not ids or meta.get("prompt_tokens", len(ids)) != len(ids):
            raise ValueError(f"the engine told {len(ids)} ids of a prompt of {meta.get('prompt_tokens')} tokens")
        return ids

    async def _fill(self, sample: Sample, prompt: Prompt, ids: list[int], gate: asyncio.Semaphore) -> None:
        settings = self._settings
        sampling = {**settings.sampling, **ALWAYS}
        if settings.seed is not None:
            sampling["sampling_seed"] = (settings.seed + sample.index) % 2**31
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        if settings.top_k:
            body["top_logprobs_num"] = settings.top_k
        body |= prompt.multimodal or {}
        sample.tokens = list(ids)
        try:
            take(sample, ids, await self._ask(body, sample.group_index, gate), settings.top_k)
        except (RelaxError, ValueError) as error:
            _fail(sample, error)

    async def _ask(self, body: dict[str, Any], group: int, gate: asyncio.Semaphore) -> Any:
        rid = f"{self._tag}{next(self._numbers):0{NUMBER_CHARACTERS}x}"
        async with gate:
            if self._aborted:
                raise _Aborted
            self._running.add(rid)
            try:
                return await self._engines.generate(
                    {**body, "rid": rid},
                    Role.ROLLOUT,
                    model=self._settings.model,
                    affinity_key=f"group-{group}",
                    timeout_seconds=self._settings.timeout_seconds,
                )
            finally:
                self._running.discard(rid)


def take(sample: Sample, prompt_ids: Sequence[int], answer: Any, top_k: int = 0) -> None:
    """Put an engine's answer into the sample. ValueError when it does not fit, and then nothing is changed."""
    meta = answers.meta_of(answer)
    kind = answers.finish_type(meta)
    if kind not in _FINISH:
        raise ValueError(f"finish_reason is {kind!r}, wanted one of {', '.join(_FINISH)}")
    rows = answers.rows_of(meta, "output_token_logprobs")
    ids = answer.get("output_ids")
    if not isinstance(ids, list):
        ids = answers.ids_of(rows, "output_token_logprobs")
    values = answers.log_probs(rows, "output_token_logprobs", ids)
    text = answer.get("text")
    if not isinstance(text, str):
        raise ValueError(f"text is {text!r:.40}, wanted text")
    top: tuple[list[list[int]], list[list[float]]] | None = None
    if top_k and ids:
        rows = answers.rows_of(meta, "output_top_logprobs")
        top = answers.top_rows(rows, "output_top_logprobs", len(ids), top_k)
    sample.tokens = [*prompt_ids, *ids]
    sample.response, sample.response_length = text, len(ids)
    sample.rollout_log_probs = values
    sample.weight_versions = answers.versions_of(meta)
    sample.status = _FINISH[kind]
    if top_k:
        sample.student_topk_token_ids, sample.student_topk_log_probs = top or ([], [])


class _Aborted(ValueError):
    """The batch was aborted before the request was sent."""


def _fail(sample: Sample, error: Exception) -> None:
    sample.status = SampleStatus.ABORTED if isinstance(error, _Aborted) else SampleStatus.FAILED
    if sample.status is SampleStatus.ABORTED:
        return
    sample.error = getattr(error, "message", None) or str(error)
