from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hazards import steps
from tests.hazards.steps import Metal
from tests.kernels import shim


@pytest.fixture(scope="module")
def metal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metal]:
    """The engine that a test is parametrised with, by its name in `steps.ENGINES`."""
    if shim.COMPILER is None:
        pytest.skip("needs g++")
    with steps.engine(steps.ENGINES[request.param], tmp_path_factory.mktemp("model")) as made:
        yield made
