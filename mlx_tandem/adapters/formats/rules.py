"""How keys of a configuration are judged.

Each key of the two formats is one of: used; harmless (it says how the adapter was trained, or what the tensors' own
names and shapes say better); or off: refused unless its value says that the thing is not used. A key in no table is
refused too, unless its value is null, false or empty, as new switches arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_tandem.adapters.formats.parts import CONFIG, refuse


def is_off(value: object) -> bool:
    """Whether this value of a switch says that it is not used."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def refuse_unknown(config: Mapping[str, Any], known: frozenset[str], prefix: str = "") -> None:
    for key, value in config.items():
        if key not in known and not is_off(value):
            refuse(CONFIG, prefix + key, "is not a known key of this adapter format")


def integer(config: Mapping[str, Any], key: str, prefix: str = "") -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(CONFIG, prefix + key, "must be an integer" if key in config else "is missing")
    return value


def positive(value: object, field: str, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(CONFIG, field, "is missing" if value is None else "must be a number")
    if not 0 < value <= high:  # in this form a NaN fails too
        refuse(CONFIG, field, f"must lie between 0 and {high:g}")
    return float(value)


def rank_in_range(value: int, field: str, max_rank: int) -> int:
    if not 1 <= value <= max_rank:
        refuse(CONFIG, field, f"is {value}; ranks from 1 to {max_rank} are served")
    return value
