from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.model.warm_up import AGREEMENT, LONG, RUNS, _shortest


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
