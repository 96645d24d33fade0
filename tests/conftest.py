from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlx_tandem.model import device  # noqa: F401  first of all: it loads a fast BLAS before MLX
from tests.serving import RunningServer, demo_config, serving


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One server on the built-in model, shared by all tests that do not harm it."""
    with serving(demo_config()) as running:
        yield running
