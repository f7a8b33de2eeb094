"""Ctrl-C and TERM: one sentence about what goes on and how to end it, then 130 or 143."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A signal that ends the verb. A `KeyboardInterrupt`, so that whatever runs lets go of its children."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """128 and the number of the signal."""
    return 128 + (interrupt.number if isinstance(interrupt, Interrupted) else int(signal.SIGINT))


@contextmanager
def term_interrupts() -> Iterator[None]:
    """TERM raises `Interrupted` inside, as Ctrl-C raises `KeyboardInterrupt`. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def told(sentence: Callable[[], str]) -> Iterator[None]:
    """When the block is interrupted, say what that leaves on stderr; the innermost sentence is the one that is said."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        say(interrupt, sentence())
        raise


def say(interrupt: KeyboardInterrupt, sentence: str = "") -> None:
    """`interrupted (SIGTERM); …` once per interrupt."""
    if getattr(interrupt, "said", False):
        return
    interrupt.said = True  # type: ignore[attr-defined]
    number = interrupt.number if isinstance(interrupt, Interrupted) else int(signal.SIGINT)
    print(f"interrupted ({signal.Signals(number).name})" + (f"; {sentence}" if sentence else ""), file=sys.stderr)
