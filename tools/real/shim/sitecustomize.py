"""Lets SGLang import and run on a CPU build of torch. Python reads this file at every start, before anything else.

When torchvision is imported for the first time, and torch has no CUDA, three things are put in place: the schemas of
torchvision's compiled operators (its PyPI wheel registers implementations for a CUDA build), `torch.empty` without
pinned memory (there is no allocator for it), and CUDA events and streams that are always done (CPU work is finished
when the call returns). docs/real-engine.md says what that leaves unproven.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing to record."""

    def wait(self, *_: Any, **__: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Done."""
        return True

    def elapsed_time(self, _other: Any) -> float:
        """No time is measured."""
        return 0.0


class _Stream:
    """A stream whose work is finished."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, *_: Any) -> _Event:
        """An event that has happened."""
        return _Event()

    def query(self) -> bool:
        """Done."""
        return True


def _prepare() -> None:
    import torch

    if torch.cuda.is_available():
        return
    plain = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return plain(*args, **options)

    torch.empty = empty
    torch.cuda.Event = _Event
    torch.cuda.current_stream = lambda *_args, **_options: _Stream()
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _BeforeTorchvision(MetaPathFinder):
    """Prepares torch once, when torchvision is looked for; finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _prepare()
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
