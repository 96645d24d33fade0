"""Checks of the device, without an engine."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import distributions

from mlx_tandem import demo
from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.cli.doctor.result import Failed, Figures, Outcome

CASES = 42
"""Random cases of attention for each portable back end."""

FUSED_CASES = 12
"""Random cases for each fused back end, which compiles kernels for each case."""

POOL_BLOCKS = 1400
"""Blocks of the pool on a CPU, of 96 KB each in float32."""

GPU_POOL_BLOCKS = 20_000
"""Blocks of the pool on a GPU, of 48 KB each in bfloat16: a copy must stand out from a GPU's work space."""


def opens(bench: Bench) -> Outcome:
    """Check that MLX opens a device and multiplies matrices rightly on it."""
    from mlx_tandem.model import backend, device
    from mlx_tandem.model.kernels import checking

    here = backend.current()
    says, on_cpu = here.describe(), here.name == "cpu"
    error = checking.product_error()
    figures: Figures = {"product_error": error, "memory_gb": round(here.memory_limit().size / 2**30, 1)}
    if not error < 1e-5:
        raise Failed(f"{says}: a product of matrices is wrong by {error:.1e}", _REPORT, figures)
    names = {d.metadata["Name"] for d in distributions()}
    if on_cpu and (sys.platform == "darwin" or names & {"mlx-cuda-12", "mlx-cuda-13"}):
        return Outcome(
            says, figures, "MLX has not found the GPU and computes on the CPU: is this a virtual machine or container?"
        )
    if on_cpu and sys.platform == "linux" and not device.OPENBLAS:
        return Outcome(
            says,
            figures,
            "MLX's own BLAS on Linux is the reference one, about ten times slower than OpenBLAS: "
            "`apt-get install libopenblas0` or `dnf install openblas`; it is found by itself.",
        )
    return Outcome(says, figures)


_REPORT = "This must not happen on a machine that is supported: please report it."


def compiles(bench: Bench) -> Outcome:
    """Check that compiled functions give the same as their parts."""
    from mlx_tandem.model import backend
    from mlx_tandem.model.kernels import checking

    error = checking.compiled_error()
    if not error < 1e-5:
        raise Failed(f"a fused function differs from its parts by {error:.1e}", _REPORT)
    if os.environ.get("MLX_DISABLE_COMPILE"):
        return Outcome("switched off", advice="MLX_DISABLE_COMPILE is set: steps are slower than they could be.")
    if backend.current().arithmetic.compiled_by_the_host and not shutil.which("g++"):
        return Outcome(
            "without g++, nothing is fused",
            advice="MLX fuses operations on a CPU with g++; without it steps are slower. `apt-get install g++`, or "
            "`xcode-select --install` on macOS.",
        )
    return Outcome("fused functions give what their parts give")


def attention(bench: Bench) -> Outcome:
    """Check every attention back end against plain float32."""
    from mlx_tandem.model.ops.attention import cases

    figures: Figures = {}
    wrong = []
    for name, backend in cases.BACKENDS.items():
        number = FUSED_CASES if name in cases.FUSED else CASES
        for dtype, worst in cases.worst(backend, number).items():
            figures[f"{name} {dtype}"] = worst.error
            if not worst.error <= worst.allowed:
                wrong.append(f"'{name}' is off by {worst.error:.1e} in {worst.case} ({worst.allowed:.0e} is allowed)")
    if wrong:
        raise Failed("; ".join(wrong), _REPORT, figures)
    said = ", ".join(f"{name} {error:.0e}" for name, error in figures.items())
    return Outcome(f"right in {CASES} random cases, the largest errors: {said}", figures)


def pool(bench: Bench) -> Outcome:
    """Check that decode steps write the KV pool in place."""
    from mlx_tandem.model import backend
    from mlx_tandem.model.trials import growth

    here = backend.current()
    blocks = POOL_BLOCKS if here.name == "cpu" else min(GPU_POOL_BLOCKS, here.memory_limit().size // 8 // (48 << 10))
    found = growth(str(demo.MODEL_PATH), blocks)
    figures: Figures = {"pool_mb": found.pool >> 20, "beside_it_mb": round(found.one_at_a_time / 2**20, 2)}
    if found.overlapped is not None:
        figures["beside_it_overlapped_mb"] = round(found.overlapped / 2**20, 2)
    allowed = found.copy // 2
    if found.one_at_a_time > allowed:
        raise Failed(
            f"a step took {figures['beside_it_mb']} MB beside a pool of {figures['pool_mb']} MB: it is copied",
            f"Steps get slower with the size of the pool; a small `--num-blocks` helps until it is mended. {_REPORT}",
            figures,
        )
    if found.overlapped is not None and found.overlapped > allowed:
        return Outcome(
            "written in place, but only one step at a time",
            figures,
            f"Steps dispatched behind each other copy the pool on this device. {_REPORT}",
        )
    return Outcome(f"written in place: {figures['beside_it_mb']} MB beside {figures['pool_mb']} MB", figures)
