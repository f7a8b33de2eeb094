"""A judge decides whether the answer agrees with the label (the manner of dapo).

The answer has to be marked and short; otherwise the reward is 0 and nobody is asked. The judge's answer counts as yes
when a `1` is among its first 16 characters. In a deferred batch a judge that fails is the batch's failure; inline it is
a reward of 0 with `format_error`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_slurm.core.plan import Role
from relax_slurm.errors import ConfigError, RelaxError, UpstreamFailed
from relax_slurm.workload.at_once import at_once
from relax_slurm.workload.rewards.answers import MAX_ANSWER, answer_of
from relax_slurm.workload.rewards.posting import TIMEOUT_SECONDS, Poster
from relax_slurm.workload.rewards.registry import Registration, RewardContext
from relax_slurm.workload.samples import Sample

TEMPLATE = """\
Question: {question}
Reference: {label}
Answer: {answer}
Is the answer right? Say 1 or 0."""
LOOKED_AT = 16
"""Characters of the judge's answer in which a 1 means yes."""
SAMPLING = {"temperature": 0.0, "max_new_tokens": 32}


class JudgeReward:
    """Asks the run's judge through the gateway, which renders messages with the judge's own template."""

    def __init__(self, context: RewardContext, poster: Poster | None = None) -> None:
        options = context.options
        self._deferred = context.deferred
        self._template = options.get("template") or TEMPLATE
        check_template(self._template)
        self._bare = bool(options.get("bare_answers"))
        self._sampling = {**SAMPLING, **(options.get("sampling") or {})}
        self._model = options.get("model")
        self._concurrency = context.concurrency
        timeout = float(options.get("timeout_seconds") or TIMEOUT_SECONDS)
        url = context.gateway_url.rstrip("/") + "/genrm/generate"
        self._poster = poster or Poster(url, context.token, timeout_seconds=timeout)

    async def score(self, samples: Sequence[Sample]) -> None:
        """Part of RewardAdapter. A judge that fails in a deferred batch raises; the others are not asked any more."""
        await at_once([sample for sample in samples if not sample.remove_sample], self._score, self._concurrency)

    async def close(self) -> None:
        """Part of RewardAdapter."""
        await self._poster.close()

    async def _score(self, sample: Sample) -> None:
        sample.reward_detail = await self._one(sample)
        sample.reward = float(sample.reward_detail["score"])

    async def _one(self, sample: Sample) -> dict[str, Any]:
        answer = answer_of(sample.response, bare=self._bare)
        if answer is None or len(answer) > MAX_ANSWER:
            return result(0.0, None if answer is None else answer[:MAX_ANSWER], "", format_error=True)
        asked = sample.prompt or sample.metadata.get("question", "")
        question = self._template.format(question=asked, label=sample.label or "", answer=answer)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": question}],
            "sampling_params": self._sampling,
        }
        if self._model:
            body["model"] = self._model
        try:
            said = (await self._poster.post(body, f"group-{sample.group_index}")).get("response")
            if not isinstance(said, str):
                raise UpstreamFailed(f"{self._poster.url}: the judge's answer has no response, seen {said!r:.60}")
        except RelaxError:
            if self._deferred:
                raise
            return result(0.0, answer, "", format_error=True)
        return result(1.0 if "1" in said[:LOOKED_AT] else 0.0, answer, said, format_error=False)


def result(score: float, pred: str | None, said: str, *, format_error: bool) -> dict[str, Any]:
    """What the adapter tells of a sample."""
    return {"score": score, "acc": score == 1.0, "pred": pred, "judge_response": said, "format_error": format_error}


def check_template(template: str) -> None:
    """ConfigError unless the template has the three fields and no others."""
    try:
        template.format(question="", label="", answer="")
        bad = "{answer}" not in template
    except (KeyError, IndexError, ValueError):
        bad = True
    if bad:
        raise ConfigError(
            f"batch.reward.template: {template[:60]!r} cannot be filled in; it needs {{answer}} and may have "
            "{question} and {label}; write other braces twice"
        )


REGISTRATION = Registration("genrm", JudgeReward, supports_deferred=True, role=Role.GENRM)
