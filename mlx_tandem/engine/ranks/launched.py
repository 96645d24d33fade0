"""What MLX's variables say of ranks that `mlx.launch`, or somebody on each machine, has started."""

from __future__ import annotations

import json
import os
from pathlib import Path

RANK = "MLX_RANK"
"""MLX's variable with the number of a rank. It is set where ranks were started by `mlx.launch`, or like it."""

COUNTED = {"ring": "MLX_HOSTFILE", "jaccl": "MLX_IBV_DEVICES"}
"""MLX's variables that name a JSON file with a list of all ranks."""


def launched() -> int | None:
    """Return the number of this rank if ranks were started by `mlx.launch`, or like it; else None."""
    number = os.environ.get(RANK, "")
    return int(number) if number.isdecimal() else None


def count(mode: str) -> int:
    """Return how many ranks were started, as MLX's variables say; 0 where they do not."""
    if mode == "nccl":
        number = os.environ.get("MLX_WORLD_SIZE", "")
        return int(number) if number.isdecimal() else 0
    listed = hosts(os.environ.get(COUNTED.get(mode, ""), ""))
    return len(listed) if isinstance(listed, list) else 0


def here(mode: str) -> int:
    """Return how many of the ranks are on this rank's machine; 1 where that is unknown."""
    listed, number = hosts(os.environ.get("MLX_HOSTFILE", "")), launched()
    if mode != "ring" or not isinstance(listed, list) or number is None or number >= len(listed):
        return 1
    names = [str(each[0]).rpartition(":")[0] if isinstance(each, list) and each else "" for each in listed]
    return names.count(names[number])


def hosts(path: str) -> object:
    """Return the contents of a JSON file of hosts; None if it cannot be read."""
    try:
        found: object = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return None
    return found
