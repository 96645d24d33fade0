from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.model import warm_up
from mlx_tandem.model.warm_up import AGREEMENT, CHUNK_SECONDS, CHUNKS, ENOUGH_CHUNKS, LONG, RUNS, _shortest


@given(st.lists(st.floats(1e-3, 1e3), min_size=RUNS, max_size=RUNS))
def test_a_step_runs_until_two_of_its_times_agree_or_one_is_long(times: list[float]) -> None:
    """The first, which pays for tracing, says nothing."""
    taken: list[float] = []

    def run() -> Iterator[float]:
        for time in times:
            taken.append(time)
            yield time

    assert _shortest(run()) == min(taken[1:])
    if times[1] >= LONG:
        assert len(taken) == 2
        return
    agrees = [sorted(times[1:n])[1] <= AGREEMENT * min(times[1:n]) for n in range(3, RUNS + 1)]
    assert len(taken) == (3 + agrees.index(True) if any(agrees) else RUNS)


@given(st.lists(st.floats(1e-3, 3e3), min_size=len(CHUNKS), max_size=len(CHUNKS)))
def test_chunks_are_timed_until_enough_of_them_have_taken_long_enough(times: list[float]) -> None:
    took = dict(zip(CHUNKS, times, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "_chunks", lambda info: list(CHUNKS))
        patch.setattr(warm_up, "_chunk", lambda info, length, context: (length, context))
        patch.setattr(warm_up, "_milliseconds", lambda runner, plan: took[plan])
        nothing: Any = None
        measured = warm_up._time_chunks(nothing, nothing, lambda stage, fraction: None)
    assert [chunk[:2] for chunk in measured] == list(CHUNKS[: len(measured)])
    spent = [2e-3 * sum(times[:n]) for n in range(len(times) + 1)]
    assert all(spent[n] < CHUNK_SECONDS for n in range(ENOUGH_CHUNKS, len(measured)))
    assert len(measured) == len(CHUNKS) or (len(measured) >= ENOUGH_CHUNKS and spent[len(measured)] >= CHUNK_SECONDS)
