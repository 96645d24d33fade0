"""MLX's back end for Apple's GPUs: kernels that only their outputs order, and memory shared with all programs.

Nothing of this was ever run on Metal (docs/macs.md).
"""

from __future__ import annotations

import platform
import re

import mlx.core as mx

from mlx_tandem.model.backend import base
from mlx_tandem.model.device import Limit, UnifiedMemory, available_on_macos

EMULATE_BFLOAT16 = re.compile(r"Apple M[12]\b")
"""GPUs that compute float16 in hardware and bfloat16 by converting it. By Apple's Metal feature set tables bfloat16
is native from the family Apple9 on, which is M3."""

_LONG = 64
"""Fewest tokens of a forward that always pauses: a layer of so many takes longer than the host needs to build one."""


class Metal(base.Backend):
    """The back end for Apple's GPUs."""

    def driver(self) -> str:
        """Return the version of macOS, which has the compiler of kernels."""
        return platform.mac_ver()[0]

    def advice(self, dtype: str) -> str:
        """Return advice about bfloat16 on GPUs that have to emulate it."""
        if dtype == "bfloat16" and EMULATE_BFLOAT16.match(self.describe()):
            return "this GPU has no bfloat16 in hardware: --dtype float16 is faster, unless the model overflows in it"
        return ""

    def free_memory(self) -> Limit:
        """Return a share of what macOS recommends, or what other programs leave."""
        info = mx.device_info()
        sizes = int(info["memory_size"]), int(info["max_recommended_working_set_size"])
        return UnifiedMemory(*sizes, available_on_macos()).limit()

    def bound_memory(self, resident: int, most: int) -> None:
        """Keep up to `resident` bytes mapped, on macOS 15 or newer, and have MLX wait before it takes more than `most`.

        macOS may unmap memory that was idle for a moment, and the next step waits until it is mapped again. MLX's own
        limit is one and a half times what macOS recommends, and macOS swaps long before that.
        """
        if tuple(int(n) for n in platform.mac_ver()[0].split(".")[:2] if n.isdigit()) >= (15, 0):
            mx.set_wired_limit(min(resident, int(mx.device_info()["max_recommended_working_set_size"])))
        mx.set_memory_limit(most)


METAL = Metal(
    name="metal",
    kernels=base.Kernels(
        target="metal",
        tested_to_write=True,  # it was never run on Metal
        ordered_by_outputs=True,  # docs/decisions/metal-order.md
        mlx_has_its_own=True,
    ),
    steps=base.Steps(
        # Up to eleven command buffers of 101 operations are in flight (`MAX_ACTIVE_TASKS` in mlx/transforms.cpp,
        # `needs_commit` in mlx/backend/metal/device.cpp), which is a whole forward. MLX's own command buffers are not
        # longer than a layer; macOS would stop one that takes too long.
        long_forward=base.LongForward(tokens=_LONG, gathers=True),
        drive_bytes=16 << 20,
    ),
    products=base.Products(
        # A forward that pauses has two layers in flight at most, and a shorter one may have all of them.
        dequantised_layers=2,
        dequantised_tokens=_LONG,
        tile_sizes=(1, 8, 32, 128, 512),
    ),
    arithmetic=base.Arithmetic(),
    memory=base.Memory(chunk_tokens=(2048, 1024, 512, 256)),  # a Mac's memory is small
    learning=base.Learning(micro_batch_tokens=512, times_slices=True),
    measuring=base.Measuring(),
)
