"""A reward service of the user's own: one POST per sample with prompt, response, label and metadata; `{"score"}` back.

It may use GPUs that nobody here knows of, at a time that nobody here decides, so it does not support deferral.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from relax_slurm.errors import ConfigError, UpstreamFailed
from relax_slurm.workload.at_once import at_once
from relax_slurm.workload.rewards.posting import TIMEOUT_SECONDS, Poster
from relax_slurm.workload.rewards.registry import Registration, RewardContext
from relax_slurm.workload.samples import Sample


class RemoteReward:
    """Asks a URL."""

    def __init__(self, context: RewardContext, poster: Poster | None = None) -> None:
        url = context.options.get("url")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"batch.reward.url: seen {url!r:.60}, wanted the http(s) URL of the reward service")
        timeout = float(context.options.get("timeout_seconds") or TIMEOUT_SECONDS)
        self._poster = poster or Poster(url, timeout_seconds=timeout)
        self._concurrency = context.concurrency

    async def score(self, samples: Sequence[Sample]) -> None:
        """Part of RewardAdapter. A service that fails three times, or gives no finite number, fails the batch."""
        await at_once([sample for sample in samples if not sample.remove_sample], self._one, self._concurrency)

    async def close(self) -> None:
        """Part of RewardAdapter."""
        await self._poster.close()

    async def _one(self, sample: Sample) -> None:
        body = {
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "metadata": sample.metadata,
        }
        answer = await self._poster.post(body)
        score = answer.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise UpstreamFailed(f"{self._poster.url}: score is {score!r:.40}, wanted a finite number")
        sample.reward = float(score)
        sample.reward_detail = {name: value for name, value in answer.items() if name != "score"}


REGISTRATION = Registration("remote", RemoteReward, supports_deferred=False)
