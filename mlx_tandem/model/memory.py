"""How many bytes of a device's memory this server may use beside everything else that runs on the machine."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from typing import NamedTuple

_GIB = 1 << 30

LARGE = 32 * _GIB
"""Memory of a Mac from which on macOS and other programs need a small share of it."""

SHARE_OF_SMALL, SHARE_OF_LARGE = 0.8, 0.9
"""Share of macOS's recommended working set that the server takes on a Mac below LARGE, and from there on."""

HOST_BYTES = 600 << 20
"""Memory of the front process and of the engine's Python interpreter, which lies in the same memory on a Mac."""

RESERVE = 1 * _GIB
"""Bytes of a Mac's available memory that are left to other programs, which grow while the server runs."""

_VM_STAT = "/usr/bin/vm_stat"
_USABLE_PAGES = ("free", "inactive", "speculative", "purgeable")


class Limit(NamedTuple):
    """The number of bytes that the server may use on the device, and the reason in words for people."""

    size: int
    reason: str
    shared: bool
    """Whether the rest belongs to other programs, so that nothing may grow beyond `size`."""


@dataclass(frozen=True)
class UnifiedMemory:
    """Memory of a Mac in bytes. Its CPU, its GPU and all programs share it."""

    total: int
    working_set: int
    """The most that macOS recommends for one process on the GPU."""

    available: int | None = None
    """Memory that programs can get without swapping; None: unknown."""

    def limit(self) -> Limit:
        """Return the smaller of a share of the working set and what other programs leave."""
        share = SHARE_OF_LARGE if self.total >= LARGE else SHARE_OF_SMALL
        size = min(int(self.working_set * share), self.total - HOST_BYTES)
        reason = f"{share:.0%} of the {_gb(self.working_set)} that macOS recommends for the GPU"
        if self.available is not None and self.available - RESERVE - HOST_BYTES < size:
            size = max(self.available - RESERVE - HOST_BYTES, 0)
            reason = f"other programs leave {_gb(self.available)} of {_gb(self.total)}"
        return Limit(size, reason, shared=True)


def available_on_macos() -> int | None:
    """Return the bytes that macOS can hand out without swapping; None where `vm_stat` does not say."""
    try:
        said = subprocess.run([_VM_STAT], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_vm_stat(said)


def parse_vm_stat(said: str) -> int | None:
    """Return the bytes in the output of `vm_stat` that macOS can hand out: the free, inactive, speculative and
    purgeable pages, and active pages with the content of files, which macOS drops and reads again.

    `vm_stat` reports only the number of all pages with the content of files. The share of them that is active is taken
    to be the share of active pages among active and inactive ones. Return None for text that is not such an output.
    """
    page = re.search(r"page size of (\d+) bytes", said)
    found = re.findall(r"^(?:Pages )?([\w -]+?)(?: pages)?:\s+(\d+)\.", said, re.MULTILINE)
    counts = {kind: int(count) for kind, count in found}
    if page is None or "free" not in counts:
        return None
    usable = sum(counts.get(kind, 0) for kind in _USABLE_PAGES)
    active, files = counts.get("active", 0), counts.get("File-backed", 0) - counts.get("speculative", 0)
    kept = max(active + counts.get("inactive", 0), 1)  # pages in one of the two lists
    return int(page[1]) * (usable + min(max(files, 0) * active // kept, active))


def machine_bytes() -> int:
    """Return the bytes of memory that the machine has, in use or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_on_linux() -> int:
    """Return the bytes that the machine has free, or fewer if this process's container has fewer left."""
    total = machine_bytes()
    if (available := _fields("/proc/meminfo").get("MemAvailable:")) is not None:
        total = min(total, available * 1024)
    for limit, used, stat, cached in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        most, now = (_fields(f"/sys/fs/cgroup/{name}", named=False).get("", None) for name in (limit, used))
        if most is not None and now is not None:
            files = _fields(f"/sys/fs/cgroup/{stat}").get(cached, 0)  # the kernel gives it back when somebody needs it
            total = min(total, max(most - max(now - files, 0), 0))
    return total


def _fields(path: str, *, named: bool = True) -> dict[str, int]:
    """Return the numbers in one of the kernel's files by the word before each; empty if there is no such file."""
    try:
        with open(path) as f:
            lines = [line.split() for line in f]
    except OSError:
        return {}
    pairs = [line[:2] if named else ["", line[0]] for line in lines if len(line) > named]
    return {name: int(value) for name, value in pairs if value.isdigit()}


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
