"""The machines that `tandem plan` knows: their memory, their bandwidth and their arithmetic, each with its source."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from mlx_tandem.errors import InvalidRequest

GIB = 1 << 30

APPLE = "https://support.apple.com/specs"
"""Apple's technical specifications, which state memory bandwidths. They state no throughput of arithmetic: that of the
GPUs follows from their cores and clock, as in https://en.wikipedia.org/wiki/Apple_silicon."""
NVIDIA = "https://www.nvidia.com/en-us/data-center/"
"""NVIDIA's data sheets: bandwidth, and throughput of dense products in bfloat16."""


class Chip(NamedTuple):
    """The facts of one kind of device."""

    title: str
    maker: Literal["apple", "nvidia"]
    bandwidth: float  # GB/s by its maker
    tflops: float  # float32 for Apple's GPUs, dense bfloat16 for NVIDIA's
    memory: tuple[int, ...]  # GiB with which it is sold
    source: str
    dies: int = 1  # that are joined into one


CHIPS: dict[str, Chip] = {
    "m1": Chip("M1", "apple", 68, 2.6, (8, 16), APPLE),
    "m1-pro": Chip("M1 Pro", "apple", 200, 5.2, (16, 32), APPLE),
    "m1-max": Chip("M1 Max", "apple", 400, 10.4, (32, 64), APPLE),
    "m1-ultra": Chip("M1 Ultra", "apple", 800, 20.8, (64, 128), APPLE, 2),
    "m2": Chip("M2", "apple", 100, 3.6, (8, 16, 24), APPLE),
    "m2-pro": Chip("M2 Pro", "apple", 200, 6.8, (16, 32), APPLE),
    "m2-max": Chip("M2 Max", "apple", 400, 13.6, (32, 64, 96), APPLE),
    "m2-ultra": Chip("M2 Ultra", "apple", 800, 27.2, (64, 128, 192), APPLE, 2),
    "m3": Chip("M3", "apple", 100, 3.5, (8, 16, 24), APPLE),
    "m3-pro": Chip("M3 Pro", "apple", 150, 6.4, (18, 36), APPLE),
    "m3-max": Chip("M3 Max", "apple", 400, 14.1, (48, 64, 128), APPLE),
    "m3-ultra": Chip("M3 Ultra", "apple", 819, 28.2, (96, 256, 512), APPLE, 2),
    "m4": Chip("M4", "apple", 120, 4.3, (16, 24, 32), APPLE),
    "m4-pro": Chip("M4 Pro", "apple", 273, 9.2, (24, 48, 64), APPLE),
    "m4-max": Chip("M4 Max", "apple", 546, 18.4, (48, 64, 128), APPLE),
    "a100": Chip("NVIDIA A100", "nvidia", 2039, 312, (80,), NVIDIA),
    "h100": Chip("NVIDIA H100", "nvidia", 3350, 989, (80,), NVIDIA),
    "h200": Chip("NVIDIA H200", "nvidia", 4800, 989, (141,), NVIDIA),
}
"""The chips by name, each with the most GPU cores with which it is sold. Memory that comes with a narrower chip of the
same name only is left out, such as the 36 GB of an M4 Max with 410 GB/s.
"""

FREE = {"a100": 84_400_000_000, "h100": 84_465_090_560, "h200": 149_557_477_376}
"""Bytes that a server finds free on NVIDIA's cards. Those of the H100 and the H200 are in benchmarks/results
(`engine.memory.limit`); an A100 has as much memory as an H100.
"""

SYSTEM = 3 * GIB
"""Bytes of a Mac's memory that macOS and a browser are assumed to use."""


class Machine(NamedTuple):
    """A machine: a chip and its memory."""

    name: str
    chip: Chip
    gib: int

    @property
    def title(self) -> str:
        """The name of the machine for people."""
        return f"{self.chip.title}, {self.gib} GB" if self.chip.maker == "apple" else self.chip.title

    @property
    def total(self) -> int:
        """The bytes of a Mac's memory."""
        return self.gib * GIB

    @property
    def working_set(self) -> int:
        """The bytes that macOS recommends for one process on the GPU: 2/3 of the memory up to 32 GB and 3/4 above."""
        return self.total * 2 // 3 if self.gib <= 32 else self.total * 3 // 4

    @property
    def free(self) -> int:
        """The bytes of an NVIDIA card that a server finds free."""
        return FREE[self.name]


def names() -> list[str]:
    """Return the name of every machine: a Mac is called by its chip and its memory in GB."""
    found = []
    for name, chip in CHIPS.items():
        found += [f"{name}-{gib}" for gib in chip.memory] if chip.maker == "apple" else [name]
    return found


def machine(name: str) -> Machine:
    """Return a machine by its name, such as `m4-max-64` or `h200`. Raise InvalidRequest for an unknown one."""
    plain = name.strip().lower()
    if plain in CHIPS and CHIPS[plain].maker == "nvidia":
        return Machine(plain, CHIPS[plain], CHIPS[plain].memory[0])
    key, _, gib = (plain, "", "") if plain in CHIPS else plain.rpartition("-")
    if key in CHIPS and CHIPS[key].maker == "apple":
        if gib.isdecimal() and int(gib) in CHIPS[key].memory:
            return Machine(plain, CHIPS[key], int(gib))
        sold = ", ".join(f"{key}-{size}" for size in CHIPS[key].memory)
        raise InvalidRequest(f"{name!r} names no machine: say how much memory it has: {sold}", param="machine")
    known = ", ".join(f"{key}-GB" if chip.maker == "apple" else key for key, chip in CHIPS.items())
    raise InvalidRequest(f"{name!r} is not one of {known}, where GB is the memory, as in m4-max-64", param="machine")


def recognised(device: str, memory: int) -> Machine | None:
    """Return the machine whose device has this name, as MLX reports it; None if it is not one of these.

    `memory`: the bytes of its memory, by which a Mac is told from others with its chip.
    """
    for name, chip in CHIPS.items():
        if chip.maker == "nvidia" and re.match(rf"{chip.title}\b", device):
            return Machine(name, chip, chip.memory[0])
        if chip.maker == "apple" and device == f"Apple {chip.title}":
            gib = round(memory / GIB)
            return Machine(f"{name}-{gib}", chip, gib) if gib in chip.memory else None
    return None
