"""Counters and histograms of the gateway, and their Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

BUCKETS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0)
"""Upper bounds in seconds; requests range from a refusal to a judge's long answer."""

Labels = tuple[str, str]
"""(role, route kind); the role is empty for routes that have none."""


class Metrics:
    """What the gateway has done since it started. One per process, not for several threads."""

    __slots__ = ("_counts", "_durations", "_sums", "in_flight", "invalidations")

    def __init__(self) -> None:
        self._counts: dict[tuple[Labels, int], int] = {}
        self._durations: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self.in_flight: dict[str, int] = {}
        self.invalidations: dict[str, int] = {}

    def finished(self, labels: Labels, status: int, seconds: float) -> None:
        """Count an answer; `status` 0 means that the client left before there was one."""
        key = (labels, status)
        self._counts[key] = self._counts.get(key, 0) + 1
        buckets = self._durations.get(labels)
        if buckets is None:
            buckets = self._durations[labels] = [0] * (len(BUCKETS) + 1)
            self._sums[labels] = 0.0
        buckets[bisect_left(BUCKETS, seconds)] += 1
        self._sums[labels] += seconds

    def render(self, gauges: Mapping[str, Mapping[str, float]], role: str | None = None) -> str:
        """Prometheus text; `gauges` maps a name to values per role. With `role`, only that role's lines."""
        name = "relax_gateway_requests_total"
        lines = [f"# TYPE {name} counter"]
        for ((owner, kind), status), count in sorted(self._counts.items()):
            if role in (None, owner):
                lines.append(f'{name}{{role="{owner}",route="{kind}",status="{status}"}} {count}')
        lines += self._histogram("relax_gateway_request_seconds", role)
        counter = {"relax_gateway_invalidations_total": self.invalidations}
        for kind_of, table in (("counter", counter), ("gauge", {"relax_gateway_in_flight": self.in_flight, **gauges})):
            for name, values in table.items():
                lines.append(f"# TYPE {name} {kind_of}")
                lines += [f'{name}{{role="{owner}"}} {values[owner]:g}' for owner in values if role in (None, owner)]
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str, role: str | None) -> Iterable[str]:
        yield f"# TYPE {name} histogram"
        for (owner, kind), buckets in sorted(self._durations.items()):
            if role in (None, owner):
                labels, total = f'role="{owner}",route="{kind}"', 0
                for bound, count in zip((*BUCKETS, float("inf")), buckets, strict=True):
                    total += count
                    edge = "+Inf" if bound == float("inf") else f"{bound:g}"
                    yield f'{name}_bucket{{{labels},le="{edge}"}} {total}'
                yield f"{name}_sum{{{labels}}} {self._sums[owner, kind]:g}"
                yield f"{name}_count{{{labels}}} {total}"
