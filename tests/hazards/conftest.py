from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hazards import steps
from tests.hazards.steps import Metal
from tests.kernels import shim


class Workshop:
    """Has one engine at a time, and keeps it until another is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._name, self._open = folder, "", ExitStack()

    def get(self, name: str) -> Metal:
        if name != self._name:
            self.close()
            self._metal = self._open.enter_context(
                steps.engine((steps.ENGINES | steps.SERVED)[name], self._folder / name)
            )
            self._name = name
        return self._metal

    def close(self) -> None:
        self._name = ""
        self._open.close()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    made = Workshop(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


@pytest.fixture
def metal(request: pytest.FixtureRequest, workshop: Workshop) -> Metal:
    """The engine that a test is parametrised with, by its name in `steps.ENGINES`."""
    if shim.COMPILER is None:
        pytest.skip("needs g++")
    return workshop.get(request.param)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of one engine follow one another: building it takes longer than most of them."""
    places = [i for i, item in enumerate(items) if "metal" in getattr(item, "fixturenames", ()) and _engine(item)]
    ordered = sorted((items[i] for i in places), key=lambda item: (str(item.path), _engine(item)))
    for i, item in zip(places, ordered, strict=True):
        items[i] = item


def _engine(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get("metal", "") if callspec else ""
    return name if name in steps.ENGINES | steps.SERVED else ""
