"""The table of machines: names, memory, and devices that are recognised."""

from __future__ import annotations

import pytest

from mlx_tandem.capacity.machines import CHIPS, GIB, machine, names, recognised
from mlx_tandem.errors import InvalidRequest


def test_every_name_is_a_machine() -> None:
    assert {"m4-max-64", "m3-ultra-512", "h100", "h200"} <= set(names())
    for name in names():
        found = machine(name)
        assert found.name == name and found.chip.bandwidth > 0 and found.chip.source.startswith("https://")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("m4-max", "m4-max-48, m4-max-64, m4-max-128"),
        ("m4-max-36", "m4-max-48"),
        ("m9", "m3-ultra-GB"),
        ("h200-141", "h200"),
        ("", "h200"),
    ],
)
def test_an_unknown_machine_is_told_what_is_known(name: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        machine(name)
    assert raised.value.param == "machine" and hint in raised.value.message


def test_devices_are_recognised_by_mlx_names() -> None:
    assert recognised("NVIDIA H200", 0) == machine("h200")
    assert recognised("NVIDIA H100 80GB HBM3", 0) == machine("h100")
    assert recognised("Apple M4 Max", 64 * GIB) == machine("m4-max-64")
    assert recognised("Apple M4", 16 * GIB) == machine("m4-16")
    assert recognised("Apple M4 Max", 36 * GIB) is None, "a narrower chip of the same name"
    assert recognised("Apple M99 Max", 64 * GIB) is None
    assert recognised("CPU, 2 cores", 0) is None


def test_memory_that_a_mac_recommends() -> None:
    assert machine("m4-max-64").working_set == 48 * GIB
    assert machine("m2-24").working_set == 16 * GIB
    assert set(CHIPS) >= {"m1", "m2", "m3", "m4"}
