"""How many layers of a forward are in flight between two pauses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.model.step.pauses import Pause, Pauses

NUMBERS = st.integers(1, 64)
RULES = st.builds(
    Pauses, NUMBERS, length=NUMBERS, group=st.integers(1, 4), positions=st.integers(1, 500), layers=NUMBERS
)


@given(RULES, NUMBERS, NUMBERS, NUMBERS)
def test_layers_in_flight_gather_no_more_than_there_is_memory_for(
    rule: Pauses, rows: int, length: int, gathered: int
) -> None:
    """Unless a single layer gathers more, which is then alone in flight."""
    pause = rule.of(rows, length, gathered)
    in_flight = pause.layers * (2 if pause.ahead else 1) or rule.layers
    assert in_flight * gathered <= rule.positions or pause == Pause(1, ahead=False)
