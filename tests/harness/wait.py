"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")


def until(condition: Callable[[], _Value], seconds: float, what: str | Callable[[], str]) -> _Value:
    """Call `condition` until its value is true and answer that value; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {seconds:g} s: {said}")
        time.sleep(0.03)
    return value
