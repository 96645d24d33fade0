"""Imports the packages of clients when a test first uses them, and not when a run of other tests collects theirs.

All of them take a process five seconds, and every worker of a run collects every module.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from typing import Any

import pytest


class Package:
    """A package, which is imported when a name is looked up in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for names of its own in all that a module has
            raise AttributeError(name)
        if self._name not in sys.modules:
            importlib.import_module(self._name)
            gc.collect()
            gc.freeze()  # its objects would make each later collection a twentieth of a second longer
        return getattr(importlib.import_module(self._name), name)


def imported(name: str) -> Package:
    """The package of this name. Where it is not installed, the tests of the module that asks for it are skipped."""
    if importlib.util.find_spec(name) is None:
        pytest.skip("the extra `clients` is not installed", allow_module_level=True)
    return Package(name)
