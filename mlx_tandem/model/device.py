"""The settings of this process for MLX (a fast BLAS and environment variables before it is loaded, BLAS threads) and
the memory that the machine has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from mlx_tandem import files

# MLX's Linux CPU wheel brings the reference BLAS along: 6 GFLOP/s where OpenBLAS reaches 60 to 100. Its symbols win
# when they are global before MLX's own library is loaded, so this stands before the first import of mlx.core.
_OPENBLAS = ("libopenblas.so.0", "libopenblas64.so.0", "libopenblas.so")


def _load_openblas() -> str | None:
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return None
    # Its threads wait for work by spinning, for 2^26 cycles unless told; then they would take the time of the thread
    # that hands the work out, and of the front's process.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "10")
    for name in _OPENBLAS:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return name
    return None


# On CUDA, MLX hands work to the device in graphs, and begins a new one when the operations in it are too many or what
# they touch is too large. An operation on the KV pool touches all of it, however few blocks it reads, so that with
# MLX's own limits a step is cut into dozens of graphs, each of which costs time on the host. What one graph frees is
# there again only when it is done, so the number of operations stays limited: a long prompt would need more memory.
_GRAPH_LIMIT = "1000000"
# MLX caches the latest graphs, plans of cuDNN's attention and the like. When it makes twice as many new ones in a row
# as a cache holds, it raises an error (older versions: so many in all). A server must not end for that: making one
# anew is only slow.
_THRASHING_CHECK = "0"
# Plans of attention on unpaged sequences, which learning uses: one for each shape, each made in tens of milliseconds.
_PLANS_KEPT = "512"
_CUDA_PACKAGES = ("mlx-cuda-12", "mlx-cuda-13")


def _set_up_cuda() -> None:
    """Set MLX's environment variables for CUDA if a CUDA build is installed and not yet loaded; MLX reads them once.

    Variables that are set already stay. MLX keeps the kernels that it compiles in the system's temporary folder,
    where they are lost at the next boot and where other users can put theirs. Here they go into the user's cache
    folder.
    """
    if "mlx.core" not in sys.modules and any(_installed(package) for package in _CUDA_PACKAGES):
        os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", _GRAPH_LIMIT)
        os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", _THRASHING_CHECK)
        for cache in ("MLX_CUDA_SDPA_CACHE_SIZE", "MLX_CUDA_SDPA_BACKWARD_CACHE_SIZE"):
            os.environ.setdefault(cache, _PLANS_KEPT)
        folder = files.cache_folder() / "-".join(["kernels", version("mlx"), *gpus()])
        with contextlib.suppress(OSError):
            files.make_folder(folder)
            os.environ.setdefault("MLX_PTX_CACHE_DIR", str(folder))


def gpus(listed: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the models of the NVIDIA GPUs in this machine as listed by the driver's files, without starting it.

    MLX keeps machine code under names that do not say for which GPU it is, and machines with different GPUs may
    share a home folder: one could not load what another has compiled.
    """
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for file in listed.glob("*/information"):
            found.update(re.findall(r"^Model:\s*(\S.*?)\s*$", file.read_text(), re.MULTILINE))
    return sorted(re.sub(r"\W+", "-", kind) for kind in found)


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


# On Metal, MLX hands work to the device in command buffers. It begins a new one when the operations in it are more than
# 40 or 50, or what they touch is more than so many Mi elements (`needs_commit` in its mlx/backend/metal/device.cpp). An
# array of the KV pool has more, so that nearly every operation on it would be a command buffer by itself, and the host
# waits when ten are under way. What a command buffer frees is there again only when it is done, so the number of
# operations stays limited, to that of a graph on CUDA.
COMMAND_BUFFER_OPERATIONS = "100"
# While a display is on, macOS ends the GPU work of a process that keeps the display waiting, and with it the process
# (MLX's issue 3267). With this variable Apple's driver waits longer for work to give way.
_PATIENCE = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"


def _set_up_metal() -> None:
    """Set up MLX's command buffers and Apple's driver on macOS, unless MLX is loaded. Variables that are set stay."""
    if sys.platform == "darwin" and "mlx.core" not in sys.modules:
        os.environ.setdefault(_PATIENCE, "1")
        os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", _GRAPH_LIMIT)
        os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", COMMAND_BUFFER_OPERATIONS)


_THREADS_WERE_CHOSEN = "OPENBLAS_NUM_THREADS" in os.environ
OPENBLAS = _load_openblas()
"""The OpenBLAS library that was loaded before MLX's own BLAS, or None."""
_set_up_cuda()
_set_up_metal()

import mlx.core as mx  # noqa: E402

_CORES = os.cpu_count() or 1  # asking the system takes 10 to 50 µs, which every step on a CPU would pay
_blas = ctypes.CDLL(OPENBLAS) if OPENBLAS and not _THREADS_WERE_CHOSEN else None
_every_core_always = False


def blas_threads(every_core: bool) -> None:
    """Set how many threads BLAS uses for the next operations: every core, or half of them.

    The number belongs to the process and holds at once, also for products that were dispatched before. Their bits
    depend on it. So before it changes, everything that the calling thread has dispatched is waited for. Nothing changes
    where OPENBLAS_NUM_THREADS is set, or after `always_use_every_core`.
    """
    if _blas is None or _every_core_always:
        return
    number = _CORES if every_core else max(1, _CORES // 2)
    if _blas.openblas_get_num_threads() != number:
        mx.synchronize()
        _blas.openblas_set_num_threads(number)


def always_use_every_core() -> None:
    """Have BLAS use every core from now on. `blas_threads` does nothing any more.

    The number of threads belongs to the process, so another model in it, as a draft model is, would change the order
    of sums of a model under `--deterministic`.
    """
    global _every_core_always
    blas_threads(every_core=True)
    _every_core_always = True


def blas() -> str:
    """Return the version and the kernels of OpenBLAS, and the number of its threads; empty where another BLAS is."""
    if OPENBLAS is None:
        return ""
    library = ctypes.CDLL(OPENBLAS)
    library.openblas_get_config.restype = ctypes.c_char_p
    return f"{library.openblas_get_config().decode()}, {library.openblas_get_num_threads()} threads"


def leave_thread() -> None:
    """End the calling thread's use of MLX.

    MLX's streams have native threads, which must not outlive the calling thread: the interpreter would abort at
    exit.
    """
    mx.synchronize()
    mx.clear_streams()


# --- Memory ----------------------------------------------------------------------------------------------------------

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
