"""Rule-based reward: 1 when the response's answer is the label, as numbers or as text, else 0. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence

from relax_slurm.workload.rewards.answers import MAX_ANSWER, equal, last_number, marked_answer
from relax_slurm.workload.rewards.registry import Registration, RewardContext
from relax_slurm.workload.samples import Sample


def judge(response: str, label: str | None) -> tuple[float, str | None]:
    """Reward and answer found: a marked one, else the last number, else the whole response."""
    answer = marked_answer(response) or last_number(response) or response.strip()[: MAX_ANSWER + 1] or None
    if answer is None or label is None or len(answer) > MAX_ANSWER:
        return 0.0, answer
    return float(equal(answer, label)), answer


class MathReward:
    """Scores at once, in this process."""

    def __init__(self, context: RewardContext) -> None:
        del context  # nothing to be set

    async def score(self, samples: Sequence[Sample]) -> None:
        """Part of RewardAdapter."""
        for sample in samples:
            if not sample.remove_sample:
                sample.reward, answer = judge(sample.response, sample.label)
                sample.reward_detail = {"acc": bool(sample.reward), "pred": answer}

    async def close(self) -> None:
        """Part of RewardAdapter."""


REGISTRATION = Registration("math", MathReward, supports_deferred=True)
