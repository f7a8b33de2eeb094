"""Who holds which card, looked at from outside while a run goes on, and a trainer that takes memory as a real one does.

python -m tests.harness.turns RUN_DIR --batches 3 …   is examples/trainer.py with 60 GiB on every card in its turn
"""

from __future__ import annotations

import asyncio
import runpy
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from relax_slurm.client import lifecycle
from sidecars.ledger import GIB, NodeLedger

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = GIB
"""What a process that sleeps may keep on a card."""
TRAINING = "training"
TRAINING_BYTES = 60 * GIB
LOOK_SECONDS = 0.02


@dataclass(slots=True)
class Card:
    """One GPU over the whole watch."""

    looks: int = 0
    most: int = 0
    """Bytes held at once."""
    owners: set[str] = field(default_factory=set)
    """Everybody who held more than a context."""
    overlaps: list[str] = field(default_factory=list)


class LedgerWatch:
    """Reads the ledgers in a folder all the time; `cards` says what was seen, short turns may be missed.

    Nothing depends on it: the ledger itself refuses what does not fit, and two who are awake do not.
    """

    def __init__(self, folder: Path) -> None:
        self.cards: dict[tuple[str, int], Card] = {}
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> LedgerWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(10)

    def check(self, cards: int) -> None:
        """Fails unless this many cards were seen, none over its capacity and none with two owners at once."""
        assert len(self.cards) == cards, sorted(self.cards)
        for place, card in self.cards.items():
            assert card.overlaps == [], (place, card)
            assert 0 < card.most <= 80 * GIB, (place, card)

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            for path in self._folder.glob("*.ledger.json"):
                node = path.name.removesuffix(".ledger.json")
                held: dict[int, dict[str, int]] = {}
                for entry in NodeLedger(self._folder, node).entries():
                    owners = held.setdefault(entry.gpu, {})
                    owners[entry.owner] = owners.get(entry.owner, 0) + entry.bytes
                for gpu, owners in held.items():
                    card = self.cards.setdefault((node, gpu), Card())
                    awake = sorted(name for name, size in owners.items() if size > CONTEXT)
                    card.looks += 1
                    card.most = max(card.most, sum(owners.values()))
                    card.owners.update(name.split("/")[0] for name in awake)
                    if len(awake) > 1:
                        card.overlaps.append(" and ".join(awake))


class HoldingClient(lifecycle.LifecycleClient):
    """Training that has memory on the cards exactly as long as it has its lease."""

    ledger: Path

    @asynccontextmanager
    async def training(self, batch: int) -> AsyncIterator[None]:
        async with super().training(batch):
            nodes = [path.name.removesuffix(".ledger.json") for path in self.ledger.glob("*.ledger.json")]
            ledgers = [NodeLedger(self.ledger, node) for node in nodes]
            for ledger in ledgers:  # OutOfMemory when anybody else is on a card
                ledger.take(TRAINING, sorted({entry.gpu for entry in ledger.entries()}), TRAINING_BYTES)
            try:
                yield
            finally:
                for ledger in ledgers:
                    ledger.give(TRAINING)


def main() -> int:
    """`examples/trainer.py` with that client."""
    HoldingClient.ledger = Path(sys.argv[1]).resolve().parent / "ledger"
    lifecycle.LifecycleClient = HoldingClient  # type: ignore[misc]
    trainer = runpy.run_path(str(ROOT / "examples" / "trainer.py"))
    code: int = asyncio.run(trainer["main"]())
    return code


if __name__ == "__main__":
    sys.exit(main())
