"""Imports the model code of mlx-vlm's families without the rest of mlx-vlm, which is a server of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

PACKAGE = "mlx_vlm"

_PROCESSORS = ("processing", "processor", "image_processing", "image_processor")
"""First words of the names of modules that prepare images on the host, which is done in another process."""


def is_installed() -> bool:
    """Return whether mlx-vlm is there, without importing any of it."""
    return PACKAGE in sys.modules or find_spec(PACKAGE) is not None


def family(name: str) -> Any:
    """Return the module of a family: its `Model`, its `ModelConfig` and the configurations of its parts.

    Raises ImportError.
    """
    if PACKAGE not in sys.modules:
        sys.modules[PACKAGE] = _empty_package()
    finder = _WithoutProcessors()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(f"{PACKAGE}.models.{name}")
    finally:
        sys.meta_path.remove(finder)


def _empty_package() -> ModuleType:
    """Return the package without its own contents, so that its modules can be imported alone.

    What mlx-vlm imports in its `__init__` takes many seconds and packages that are not needed here.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("mlx-vlm is not installed")
    package = ModuleType(PACKAGE)
    package.__path__ = list(spec.submodule_search_locations)
    return package


class _Unused:
    """Stand-in for every name of a module that is left out."""


class _Nothing(ModuleType):
    """A module that has a stand-in under every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused


class _WithoutProcessors(MetaPathFinder, Loader):
    """Finds a `_Nothing` for the modules of families that are named like processors, which import transformers."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a module that is left out, None for any other."""
        package, _, name = fullname.rpartition(".")
        if package.startswith(f"{PACKAGE}.models.") and name.startswith(_PROCESSORS):
            return spec_from_loader(fullname, self)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, since the module has no contents."""
