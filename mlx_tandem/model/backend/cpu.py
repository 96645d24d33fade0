"""MLX's back end for the CPU: no kernels of ours, one step at a time, and float32 by OpenBLAS."""

from __future__ import annotations

import os
import platform
import sys

import mlx.core as mx

from mlx_tandem.model import device
from mlx_tandem.model.backend import base, cpu_functions
from mlx_tandem.model.device import Limit, available_on_linux


class Cpu(base.Backend):
    """The CPU's back end."""

    def describe(self) -> str:
        """Return one line for people that says what computes here."""
        slow = "reference BLAS (slow: install libopenblas0)" if sys.platform == "linux" else ""
        blas = "OpenBLAS" if device.OPENBLAS else slow
        return f"CPU, {os.cpu_count() or 1} cores" + (f", {blas}" if blas else "")

    def driver(self) -> str:
        """Return nothing: no kernel is compiled here."""
        return ""

    def sizes(self) -> dict[str, int | str]:
        """Return nothing: the device has no memory of its own."""
        return {}

    def share_cores(self, every_core: bool) -> None:
        """Set the number of BLAS threads, since they compute nearly all that there is to compute."""
        device.blas_threads(every_core)

    def free_memory(self) -> Limit:
        """Return what the machine has free."""
        return Limit(available_on_linux(), "what the machine has free", shared=False)

    # MLX's own exp takes 11 ns an element, one element at a time, and its attention and SwiGLU use it.

    def exp(self, x: mx.array) -> mx.array:
        """Return e to the x, vectorised by the compiler."""
        return cpu_functions.exp(x)

    def exp_alone(self, x: mx.array) -> mx.array:
        """Return e to the x by a function that is compiled by itself."""
        return cpu_functions.fused_exp(x)

    def log_sum_exp(self, x: mx.array) -> mx.array:
        """Return the logarithm of the sum of e to the x."""
        peak = x.max(-1, keepdims=True)
        return (peak + mx.log(self.exp_alone(x - peak).sum(-1, keepdims=True)))[:, 0]

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Return attention; with a mask and enough scores, by the functions of this package."""
        if isinstance(mask, mx.array) and mask.dtype == mx.bool_ and sinks is None and queries.dtype == mx.float32:
            scores = queries.shape[0] * queries.shape[1] * queries.shape[2] * keys.shape[2]
            if scores >= cpu_functions.WORTH:
                return cpu_functions.attend(queries, keys, values, scale, mask)
        return super().attend(queries, keys, values, scale, mask, sinks)

    def install_functions(self) -> None:
        """Replace the SwiGLU activation."""
        cpu_functions.install()


CPU = Cpu(
    name="cpu",
    kernels=base.Kernels(target=None),
    steps=base.Steps(
        # MLX's own operations write the pool here, and do so in place only while nothing in flight holds it: a write
        # dispatched behind a read would copy the pool (docs/decisions/dispatch.md).
        one_at_a_time=True,
        lets_go_late=False,
        tracing_is_cheap=True,  # docs/decisions/speculation.md
        # No forward pauses, since MLX frees an array when its last user has been computed.
        drive_bytes=8 << 20,  # they take 30 ms
    ),
    products=base.Products(
        only_float32_is_fast=True,  # all other types go through loops of MLX's own, at a tenth of OpenBLAS's speed
        one_by_one=True,
        windows_beat_gathers=True,  # docs/decisions/lora-delta.md
        worth_timing=False,
        tile_sizes=(1, 2, 4, 8, 16, 32, 64),
    ),
    arithmetic=base.Arithmetic(
        masks_are_slow=False,  # there is no fused attention that a mask would prevent
        angles_are_slow=True,  # MLX has a kernel for ropes on GPUs only (`model/ops/attention/rotary.py`)
        # A compiler may join a product and a sum into one instruction, which rounds only once. On x86-64 MLX calls it
        # without the flags that allow such instructions.
        fusing_keeps_bits=platform.machine() in ("x86_64", "AMD64"),
        compiled_by_the_host=True,
    ),
    memory=base.Memory(
        chunk_tokens=(1024,),  # more than a few hundred gain nothing
        # Measured with every feature on.
        layers=2,
        scores=9,
        score_bytes=4,
        gathered=1.3,
        # The memory is shared with everything else on the machine.
        most_pool=512 << 20,
        most_activations=256 << 20,
    ),
    learning=base.Learning(
        micro_batch_tokens=128,
        forward_layers=1,  # with three, streams would wait longer for the forward than for the backward
        kept_bytes=256 << 20,
        step_chunks=1,
        scores=12,
    ),
    measuring=base.Measuring(copied_numbers=8 << 20, only_small_models=True),
)
