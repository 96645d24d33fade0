"""Stages that look at the machine and run nothing on it: memory, MLX's wheel, and the neural accelerators of M5."""

from __future__ import annotations

import mmap
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.cli.doctor.host import BUILDS, numbers, wheel_tag
from mlx_tandem.cli.doctor.result import Figures, NotHere, Outcome

VM_STAT = "/usr/bin/vm_stat"

SYSCTLS = (
    "hw.memsize",
    "iogpu.wired_limit_mb",
    "kern.memorystatus_level",
    "kern.memorystatus_vm_pressure_level",
    "vm.swapusage",
)
"""Values of `sysctl` about memory that are reported beside `vm_stat`. None of them names the machine or its user."""

METALLIB = "mlx/lib/mlx.metallib"
"""The file of the package mlx-metal with MLX's compiled GPU functions."""

ACCELERATED = b"_nax_"
"""Part of the names of MLX's functions for the neural accelerators."""

ACCELERATORS_FROM = (26, 2)
"""The first version of macOS on which MLX uses the accelerators (`is_nax_available` in MLX's
mlx/backend/metal/device.cpp)."""

FIRST_GENERATION, FIRST_OF_PHONES = 17, 18
"""Generations of GPUs from which they have accelerators, by the same function: M5 is the first of Macs."""

REINSTALL = (
    "`SYSTEM_VERSION_COMPAT=0 pip install --force-reinstall --no-cache-dir mlx mlx-metal` on macOS 26.2 or newer takes "
    "the wheel that has them."
)


def memory(bench: Bench) -> Outcome:
    """Report the memory that the server may use, and the system's own figures of memory."""
    from mlx_tandem.model import backend

    limit = backend.current().memory_limit()
    figures: Figures = {"limit_gb": round(limit.size / 2**30, 2)} | backend.current().sizes()
    figures |= on_macos() if sys.platform == "darwin" else on_linux()
    says = f"{figures['limit_gb']} GB for a server: {limit.reason}"
    return Outcome(says if sys.platform == "darwin" else f"{says} (vm_stat is of macOS)", figures)


def on_macos() -> Figures:
    """Return what `vm_stat` and `sysctl` print about memory."""
    figures: Figures = {name: said for name in SYSCTLS if (said := _output("sysctl", "-n", name))}
    figures["vm_stat"] = ", ".join(f"{name} {count}" for name, count in parse_vm_stat(_output(VM_STAT)).items())
    return figures


def parse_vm_stat(said: str) -> dict[str, int]:
    """Return the counts of pages in the output of `vm_stat` by their names, and the bytes of a page as "page size"."""
    size = re.search(r"page size of (\d+) bytes", said)
    found = {"page size": int(size[1])} if size else {}
    return found | {name.strip('"'): int(n) for name, n in re.findall(r"^(?:Pages )?([^:\n]+):\s+(\d+)\.$", said, re.M)}


def on_linux() -> Figures:
    """Return the first lines of /proc/meminfo."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    figures: Figures = {name: " ".join(rest.split()) for name, _, rest in (line.partition(":") for line in lines[:5])}
    return figures


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def wheel(bench: Bench) -> Outcome:
    """Report the wheels that MLX was installed from."""
    tags = {name: tag for name in ("mlx", *BUILDS.get(sys.platform, ())) if (tag := wheel_tag(name))}
    return Outcome("; ".join(f"{name}: {tag}" for name, tag in tags.items()) or "none: MLX was built from source")


def accelerators(bench: Bench) -> Outcome:
    """Report whether MLX uses the neural accelerators of this GPU."""
    if platform.system() != "Darwin":
        raise NotHere("only Macs have these neural accelerators")
    from mlx_tandem.model import backend

    architecture = str(backend.current().sizes().get("architecture", ""))
    return judged(architecture, platform.mac_ver()[0], holds_accelerated(metallib()))


def metallib() -> Path | None:
    """Return the file with MLX's compiled GPU functions; None where it is not installed from a wheel."""
    try:
        file = Path(str(distribution("mlx-metal").locate_file(METALLIB)))
    except PackageNotFoundError:
        return None
    return file if file.is_file() else None


def holds_accelerated(file: Path | None) -> bool:
    """Return whether a file of compiled GPU functions has functions for the accelerators."""
    if file is None or not file.stat().st_size:
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(ACCELERATED) >= 0


def judged(architecture: str, release: str, in_wheel: bool) -> Outcome:
    """Return whether MLX uses the accelerators, with advice if it could use them and does not.

    Args:
        architecture: The GPU's architecture as Metal names it, such as "applegpu_g17s".
        release: The version of macOS.
        in_wheel: Whether MLX was built with functions for them.
    """
    found = re.fullmatch(r"applegpu_g(\d+)(\w)", architecture)
    figures: Figures = {"architecture": architecture, "macos": release, "in_wheel": str(in_wheel)}
    if found is None:
        return Outcome(f"unknown: the GPU calls itself '{architecture}'", figures)
    if int(found[1]) < (FIRST_OF_PHONES if found[2] == "p" else FIRST_GENERATION):
        return Outcome(f"this GPU ({architecture}) has none", figures)
    if numbers(release) < ACCELERATORS_FROM:
        return Outcome(f"not used: macOS is {release}", figures, f"MLX uses them from macOS 26.2 on. {REINSTALL}")
    if not in_wheel:
        return Outcome("not used: this MLX was built without them", figures, f"Prompts are read slower. {REINSTALL}")
    return Outcome(f"used ({architecture}, macOS {release})", figures)
