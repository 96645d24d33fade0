"""Long prompts on Macs: what is in memory at once fits its part of the budget, and no piece of work is too long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hazards import macs
from tests.hazards.command_buffers import Run
from tests.hazards.macs import Served

MACS = macs.load()
LONGEST_MS = 100.0
"""Longest time of a command buffer while macOS draws a display beside it."""


@pytest.fixture(scope="module", params=list(zip(MACS.MACS, MACS.SERVED, strict=True)), ids=lambda p: p[0].name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    mac, (size, bits) = request.param
    with macs.served(mac, size, bits, tmp_path_factory.mktemp("model") / "model") as made:
        yield made


def test_a_chunk_behind_a_full_pool_stays_within_its_budget(served: Served) -> None:
    memory = served.metal.engine.built.info.memory
    for length in (48, memory.chunk_tokens):
        assert Run(served.chunk(length, served.full)).peak <= memory.activations, f"{length} tokens"
    assert served.limits == [memory.total], "MLX waits before it takes more"


def test_no_command_buffer_takes_long(served: Served) -> None:
    mac, (size, bits) = next(own for own in zip(MACS.MACS, MACS.SERVED, strict=True) if own[0] is served.mac)
    decided = MACS.decide(mac, size, bits)
    decode = served.decode(16)
    assert len(decode.evaluations) == 1, "a step that is compiled is cheaper for the host"
    for graph in (served.chunk(decided.chunk, decided.chunk), served.chunk(decided.deep, served.full), decode):
        assert served.longest_ms(Run(graph)) <= LONGEST_MS
    assert decided.slice_ms <= LONGEST_MS
