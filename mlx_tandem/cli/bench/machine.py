"""Describes what a measurement was made on: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

_PACKAGES = ("mlx-tandem", "mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "numpy")


def describe() -> dict[str, object]:
    """Return plain data for the head of a JSON file of results."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "commit": _commit(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        },
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("OPENBLAS_", "MLX_"))},
        "versions": {"python": platform.python_version()} | _versions(),
    }


def _command(words: Sequence[str]) -> str:
    """Return the command line without the value of a key."""
    program = "tandem" if Path(words[0]).stem in ("tandem", "__main__") else words[0]
    shown = [program]
    for before, word in pairwise(words):
        shown.append("…" if before == "--api-key" else "--api-key=…" if word.startswith("--api-key=") else word)
    return " ".join(shown)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the source tree, with a plus if files differ from it; None outside a source tree."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return commit + ("+" if _output("git", "-C", str(root), "status", "--porcelain", "--", "mlx_tandem") else "")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
