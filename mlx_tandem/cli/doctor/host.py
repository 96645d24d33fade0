"""Checks that do not need the device: Python, system, packages, memory, and what is known of the last start."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path

from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.cli.doctor.result import Failed, Outcome
from mlx_tandem.engine.client.start_times import last_start

MACOS, GLIBC = (14, 0), (2, 35)
"""Oldest versions for which MLX's wheels are built."""

BUILDS = {"darwin": ("mlx-metal",), "linux": ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")}
"""Packages with the part of MLX for a device, by system."""


def numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def python(bench: Bench) -> Outcome:
    """Check that this Python is built for this machine."""
    machine = platform.machine()
    if sys.platform == "darwin" and machine != "arm64":
        if _sysctl("sysctl.proc_translated") == "1":
            raise Failed(
                f"this Python is built for {machine} and runs under Rosetta",
                "Make the environment with a native Python: one from python.org, Homebrew under /opt/homebrew, or uv; "
                "`python -c 'import platform; print(platform.machine())'` must say arm64. A terminal that was set to "
                "open with Rosetta starts such Pythons, too.",
            )
        raise Failed("this is an Intel Mac", "MLX runs on Macs with Apple silicon only.")
    return Outcome(f"Python {platform.python_version()} for {machine}")


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def system(bench: Bench) -> Outcome:
    """Check that the system is new enough for MLX."""
    if sys.platform == "darwin":
        release = platform.mac_ver()[0]
        if numbers(release) < MACOS:
            raise Failed(f"macOS {release} is too old", "MLX needs macOS 14 or newer: update macOS.")
        return Outcome(f"macOS {release}")
    if sys.platform != "linux":
        raise Failed(f"{platform.system()} is not known to MLX", "It runs on macOS and on Linux.")
    library, release = platform.libc_ver()
    if library == "glibc" and numbers(release) < GLIBC:
        raise Failed(f"glibc {release} is too old", "MLX's wheels need glibc 2.35 or newer (Ubuntu 22.04, Debian 12).")
    return Outcome(f"Linux, {library or 'an unknown C library'} {release}".strip())


def packages(bench: Bench) -> Outcome:
    """Check that the packages have versions that belong together."""
    found = {name: _version(name) for name in ("mlx-tandem", "mlx", "mlx-lm")}
    for name in ("mlx", "mlx-lm"):
        if not found[name]:
            raise Failed(f"{name} is not installed", "Install mlx-tandem again, with the extra for this device.")
        for sign, bound in wanted(name):
            if not holds(found[name], sign, bound):
                raise Failed(
                    f"{name} is {found[name]}, and {sign}{bound} is needed",
                    "`make install` takes the versions that were tested; else `pip install -U mlx-tandem` in a fresh "
                    "environment.",
                )
    builds = {name: _version(name) for name in BUILDS.get(sys.platform, ())}
    here = {name: release for name, release in builds.items() if release}
    says = ", ".join(f"{name} {release}" for name, release in (found | here).items() if release)
    if not here:
        raise Failed(
            f"{says}; the part of MLX for a device is missing",
            '`pip install "mlx-tandem[cpu]"`, `[cuda12]` or `[cuda13]` on Linux, `pip install mlx` on macOS.',
        )
    if odd := [f"{name} {release}" for name, release in here.items() if release != found["mlx"]]:
        raise Failed(
            f"mlx is {found['mlx']}, but {', '.join(odd)}",
            "They must be of one version: `pip install --force-reinstall` both at once, or make a fresh environment.",
        )
    return Outcome(says, advice=_unused_accelerators() if sys.platform == "darwin" else "")


ACCELERATED_CHIP, ACCELERATED_MACOS = 5, (26, 2)
"""The first chip whose GPU has accelerators for products, M5, and the macOS from which MLX uses them
(`is_nax_available` in mlx/backend/metal/device.cpp). The wheel that has their code has the tag of macOS 26."""


def _unused_accelerators() -> str:
    """Return why MLX does not use the accelerators of this Mac's GPU, with advice; empty if it does or has none."""
    chip = re.match(r"Apple M(\d+)", _sysctl("machdep.cpu.brand_string"))
    if chip is None or int(chip[1]) < ACCELERATED_CHIP:
        return ""
    release = _sysctl("kern.osproductversion")  # Python may report a version for old programs, such as 16.0
    if numbers(release) < ACCELERATED_MACOS:
        return f"MLX uses this GPU's accelerators from macOS 26.2 on, and this is {release}: update macOS."
    tag = wheel_tag()
    built_for = re.search(r"macosx_(\d+)_", tag)
    if built_for is None or int(built_for[1]) >= ACCELERATED_MACOS[0]:
        return ""
    return (
        f"mlx-metal is the wheel {tag}, which does without this GPU's accelerators: pip has taken macOS for an older "
        "one. `SYSTEM_VERSION_COMPAT=0 pip install --force-reinstall --no-cache-dir mlx mlx-metal` takes the right one."
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def wheel_tag(package: str = "mlx-metal") -> str:
    """Return the tag of the wheel that a package was installed from, like "py3-none-macosx_26_0_arm64".

    It is empty if the package is not installed or does not say.
    """
    try:
        said = distribution(package).read_text("WHEEL") or ""
    except PackageNotFoundError:
        return ""
    return next((line.partition(":")[2].strip() for line in said.splitlines() if line.startswith("Tag:")), "")


def wanted(name: str) -> list[tuple[str, str]]:
    """Return what this package requires of another, as ('>=', '0.32.4') and the like."""
    try:
        lines = requires("mlx-tandem") or []
    except PackageNotFoundError:  # a source tree without an installation
        return []
    line = next((part for part in lines if re.match(rf"{re.escape(name)}\s*[<>=!~]", part) and ";" not in part), "")
    return re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", line)


def holds(release: str, sign: str, bound: str) -> bool:
    """Return whether a version fulfils a requirement."""
    a, b = numbers(release), numbers(bound)
    width = max(len(a), len(b))
    a, b = a + (0,) * (width - len(a)), b + (0,) * (width - len(b))
    return {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b}[sign]


LEAST_GB, GOOD_GB = 1.5, 4.0
"""Free memory that the checks need, and that a small model needs."""


def memory(bench: Bench) -> Outcome:
    """Check that there is enough free memory for a model."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    free = _available_gb()
    says = f"{total:.1f} GB" + (f", {free:.1f} GB of it free" if free is not None else "")
    figures: dict[str, float | int | str] = {"total_gb": round(total, 1)}
    left = total if free is None else free
    if left < LEAST_GB:
        raise Failed(says, "Less than the tests of this command need. Close other programs.", figures)
    if left < GOOD_GB:
        return Outcome(says, figures, "Enough for the built-in model and small ones. Close programs to serve larger.")
    return Outcome(says, figures)


def starts(bench: Bench) -> Outcome:
    """Say what the last start of a server of this user spent its time on."""
    last = last_start()
    if last is None:
        return Outcome("no start of a server is known")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last.ended))
    most = max(last.stages, key=lambda stage: stage.seconds, default=None)
    says = f"{Path(last.model).name} was ready after {last.seconds:.1f} s on {when}"
    if most is not None:
        says += f", {most.seconds:.1f} s of it in the stage “{most.name}”"
    return Outcome(says, table={stage.name: round(stage.seconds, 2) for stage in last.stages})


def _available_gb() -> float | None:
    """Return the free memory; None where the system does not say."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) / 2**20
    except (OSError, KeyError, ValueError):
        return None
