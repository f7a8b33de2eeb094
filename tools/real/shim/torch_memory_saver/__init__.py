"""Stands in for torch_memory_saver on a CPU: takes every call, writes it to stderr, frees nothing.

`/release_memory_occupation` and `/resume_memory_occupation` go through SGLang's own code up to here. Whether memory
comes back is therefore never a result of a CPU engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def _note(*words: Any) -> None:
    sys.stderr.write(f"[memory saver shim, pid {os.getpid()}] {' '.join(map(str, words))}\n")
    sys.stderr.flush()


class _MemorySaver:
    """The names that SGLang uses."""

    enabled = True
    hook_mode = "preload"

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """Allocations in here belong to `tag`; not on a CPU."""
        yield

    @contextmanager
    def cuda_graph(self, *_args: Any, **_options: Any) -> Iterator[None]:
        """There are no graphs."""
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """There is nothing to disable."""
        yield

    def pause(self, tag: str | None = None) -> None:
        """A release of `tag`."""
        _note("pause", tag)

    def resume(self, tag: str | None = None) -> None:
        """A resume of `tag`."""
        _note("resume", tag)


torch_memory_saver = _MemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """The original preloads a library into child processes."""
    yield
