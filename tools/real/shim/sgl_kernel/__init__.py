"""Stands in for sgl_kernel, SGLang's compiled kernels: every name imports, and calling one raises.

SGLang imports its kernels for all devices at start. On a CPU with `--attention-backend torch_native` none of them is
called for the two small models here; one that were would end the engine with the name in its log.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.4.10"


class _Kernel:
    """A name that can be passed around and looked into."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        raise RuntimeError(f"{self._name} is a compiled kernel, and this is the CPU stand-in for sgl_kernel")

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kernel) and other._name == self._name

    def __repr__(self) -> str:
        return f"<{self._name}>"


def __getattr__(name: str) -> _Kernel:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kernel(f"{__name__}.{name}")


class _Part(ModuleType):
    """A submodule in which every name exists."""

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")


class _Parts(MetaPathFinder, Loader):
    """Finds every submodule of sgl_kernel."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        part = _Part(spec.name)
        part.__path__ = []
        return part

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(_Parts())
