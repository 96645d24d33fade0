"""Every dependency that is taken away is found."""

from __future__ import annotations

import pytest

from tests.hazards.plants import PLANTS
from tests.hazards.rule import faults
from tests.hazards.steps import Metal, decode_others


def test_there_are_enough_of_them() -> None:
    assert len(PLANTS) >= 20


@pytest.mark.parametrize(
    ("metal", "name"),
    sorted((plant.engine, name) for name, plant in PLANTS.items()),
    indirect=["metal"],
    scope="module",
)
def test_it_is_found(metal: Metal, name: str) -> None:
    plant = PLANTS[name]
    # Behind the steps comes one that nothing but the order makes follow them.
    launched = [step(metal) for step in (*plant.steps, decode_others)]
    assert not faults(metal.launch(*launched), metal.kept)
    with pytest.MonkeyPatch.context() as patch:
        plant.take(metal, patch)
        assert faults(metal.launch(*launched), metal.kept)
