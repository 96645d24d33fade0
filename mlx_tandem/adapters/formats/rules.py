"""Rules that both adapter formats apply to the keys of a configuration.

Each key is one of: used; harmless (it says how the adapter was trained, or repeats what the tensors' names and
shapes say); or off: refused unless its value says that the feature is not used. A key in no table is refused too,
unless its value is null, false or empty, because new switches keep appearing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_tandem.adapters.formats.parts import CONFIG, refuse


def is_off(value: object) -> bool:
    """Return whether this value of a switch says that the feature is not used."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def refuse_unknown(config: Mapping[str, Any], known: frozenset[str], prefix: str = "") -> None:
    """Raise ModelError for the first key outside `known` that is not off."""
    for key, value in config.items():
        if key not in known and not is_off(value):
            refuse(CONFIG, prefix + key, "is not a known key of this adapter format")


def integer(config: Mapping[str, Any], key: str, prefix: str = "") -> int:
    """Return the integer at `key`. Raise ModelError if it is missing or another type."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(CONFIG, prefix + key, "must be an integer" if key in config else "is missing")
    return value


def positive(value: object, field: str, high: float) -> float:
    """Return a number in (0, high]. Raise ModelError naming `field` if it is not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(CONFIG, field, "is missing" if value is None else "must be a number")
    if not 0 < value <= high:  # this form also fails for NaN
        refuse(CONFIG, field, f"must lie between 0 and {high:g}")
    return float(value)


def rank_in_range(value: int, field: str, max_rank: int) -> int:
    """Return the rank if it is from 1 to `max_rank`. Raise ModelError naming `field` if it is not."""
    if not 1 <= value <= max_rank:
        refuse(CONFIG, field, f"is {value}; ranks from 1 to {max_rank} are served")
    return value
