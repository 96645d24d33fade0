"""Reads from MLX's environment variables which ranks `mlx.launch`, or a person on each machine, has started."""

from __future__ import annotations

import json
import os
from pathlib import Path

RANK = "MLX_RANK"
"""MLX's variable with the number of a rank. `mlx.launch` sets it, and so does whoever starts ranks by hand."""

COUNTED = {"ring": "MLX_HOSTFILE", "jaccl": "MLX_IBV_DEVICES"}
"""MLX's variables that name a JSON file with a list of all ranks."""


def launched_rank() -> int | None:
    """Return the number of this rank if MLX_RANK is set; None if no ranks were launched."""
    number = os.environ.get(RANK, "")
    return int(number) if number.isdecimal() else None


def launched_count(mode: str) -> int:
    """Return how many ranks were started by MLX's variables; 0 where they do not say it."""
    if mode == "nccl":
        number = os.environ.get("MLX_WORLD_SIZE", "")
        return int(number) if number.isdecimal() else 0
    listed = read_hosts(os.environ.get(COUNTED.get(mode, ""), ""))
    return len(listed) if isinstance(listed, list) else 0


def launched_here(mode: str) -> int:
    """Return how many of the ranks are on this rank's machine; 1 where that is unknown."""
    listed, number = read_hosts(os.environ.get("MLX_HOSTFILE", "")), launched_rank()
    if mode != "ring" or not isinstance(listed, list) or number is None or number >= len(listed):
        return 1
    names = [str(each[0]).rpartition(":")[0] if isinstance(each, list) and each else "" for each in listed]
    return names.count(names[number])


def read_hosts(path: str) -> object:
    """Return the contents of a JSON file of hosts; None if it cannot be read."""
    try:
        found: object = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return None
    return found
