"""Known failures: the messages by which they are recognised, what they mean, and what helps.

The patterns are those of messages of MLX, macOS and dynamic loaders. This project has met none of the Mac's itself,
because it has not been run on one.
"""

from __future__ import annotations

import re

_REINSTALL = (
    "Install it anew on this machine: `pip install --force-reinstall --no-cache-dir mlx mlx-metal` (or remove `.venv` "
    "and `make install`)."
)

_KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"metallib.*(language version|deployment target)",
        "MLX's compiled GPU functions were built for a newer macOS than this one: a wheel of another machine, or one "
        f"bundled for it. Update macOS, or let pip choose the wheel for this one. {_REINSTALL}",
    ),
    (
        r"default metallib",
        "MLX does not find the file with its compiled GPU functions, mlx.metallib, which the package mlx-metal puts "
        f"beside its library. {_REINSTALL}",
    ),
    (
        r"incompatible architecture|wrong architecture|mach-o file, but",
        "This Python and MLX are of different architectures: MLX needs a native (arm64) Python, and an Intel one runs "
        "under Rosetta. `python -c 'import platform; print(platform.machine())'` must say arm64.",
    ),
    (
        r"[Ss]ymbol not found|NEWLAPACK|undefined symbol",
        "A library is not the one that MLX was built with: macOS is older than this MLX needs, or a second MLX "
        f"(Homebrew's, conda's) is found first. Update macOS, leave one MLX. {_REINSTALL}",
    ),
    (
        r"Library not loaded|libmlx\.(so|dylib)|No module named 'mlx(\.core)?'",
        "The part of MLX for this device is not installed: on macOS it comes with `pip install mlx`, on Linux it is an "
        'extra: `pip install "mlx-tandem[cpu]"`, `[cuda12]` or `[cuda13]`.',
    ),
    (
        r"GLIBC(XX)?_[\d.]+.*not found|is not a supported wheel",
        "This Linux is older than MLX's wheels, which need glibc 2.35 or newer (Ubuntu 22.04, Debian 12).",
    ),
    (
        r"no CUDA-capable device|CUDA driver version is insufficient|libcuda\.so|libcudart|no kernel image",
        "MLX's CUDA build finds no driver or GPU that it can use: CUDA 12 needs driver 550.54.14 or newer, CUDA 13 "
        "needs 580, and both a GPU of compute capability 7.5 or newer. `nvidia-smi` shows what there is.",
    ),
    (
        r"SubmissionsIgnored|Ignored \(for causing prior",
        "macOS takes no more GPU work from a process that has caused errors before. What came first in the log is the "
        "cause; a new process starts afresh.",
    ),
    (
        r"Insufficient Memory|ErrorOutOfMemory|out of memory|bad_alloc|Unable to allocate|MemoryError|"
        r"maximum allowed buffer size",
        "There was not enough memory. Close other programs; when serving, a smaller or quantised model, a lower "
        "`--memory-fraction` or `--kv-bits 8` need less.",
    ),
    (
        r"CallbackErrorTimeout|GPU Timeout|ImpactingInteractivity|Impacting Interactivity|CallbackErrorHang",
        "macOS ended a piece of GPU work that took too long, which it does while a display is on. Close programs that "
        "use the GPU, or let the display sleep; when serving, a smaller `--max-chunk-tokens` makes the pieces smaller. "
        "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 makes macOS more patient: it is set unless your environment sets it to "
        "something else.",
    ),
    (
        r"\[Compile::eval_cpu\]|Failed to compile function",
        "MLX fuses operations on a CPU with g++, and the one here cannot compile. Install a whole C++ compiler "
        "(`apt-get install g++`), or set MLX_DISABLE_COMPILE=1, which is slower.",
    ),
    (
        r"No Metal device|metal::load_device|Metal is not available|NSRangeException|"
        r"__NSArray0 objectAtIndex|AppleParavirt",
        "There is no Metal device for this process: an Intel Mac, a virtual machine without a GPU, or a session that "
        "may not use it.",
    ),
)


def explain(text: str) -> str:
    """Return what helps against the failure that left this text behind; empty if it is not a known one."""
    return next((advice for pattern, advice in _KNOWN if re.search(pattern, text, re.DOTALL)), "")
