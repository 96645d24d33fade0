"""Chooses where MLX compiles fused operations on a CPU: in a folder that only this user can write to, or not at all.

MLX writes C++ into the system's folder for temporary files, has g++ make a library of it, and loads that; the next
process loads the library that it finds there. So the folder must be writable and have room, libraries must be
loadable from its file system, and no other user may have written into it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from importlib.metadata import version
from itertools import count
from pathlib import Path

import mlx.core as mx

from mlx_tandem import files
from mlx_tandem.engine.plan import DeviceError
from mlx_tandem.model import backend

log = logging.getLogger(__name__)

ROOM = 1 << 20
"""Bytes that a folder must have room for. A library takes some tens of thousands."""
MOST_FAILURES = 3
"""Failures after which nothing is compiled any more, even if a test compilation succeeds each time."""

HEADER = "mlx/backend/cpu/compiled_preamble.h"
"""The header that every fused operation includes, relative to MLX's folder of headers."""
HEADER_FLAGS = "-std=c++17 -O3 -Wall -fPIC -shared -x c++-header".split()
"""The flags with which MLX calls g++, which has to find the header compiled with the same ones, and its language."""
HEADER_ROOM = 256 << 20
"""Bytes that must be free for the compiled header, which takes a fifth of them."""

_VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""Environment variables that name the folder, in the order in which MLX looks at them."""
_FAILURES = re.compile(
    r"\[Compile::eval_cpu\]|Could not load C\+\+ shared library|filesystem error|p(open|close)\(\) failed"
)
"""Messages of MLX that say that it cannot compile."""

_failures = 0
_constants = count(1)  # a process compiles a kernel once, so each test compilation needs a new constant


def prepare() -> None:
    """Choose where MLX compiles: the system's temporary folder, else a folder in the user's cache, else nowhere.

    Without compilation steps are slower. Anything but the first choice is logged. Call it before anything is
    computed.
    """
    by_host = backend.current().arithmetic.compiled_by_the_host
    if not by_host or shutil.which("g++") is None or "MLX_DISABLE_COMPILE" in os.environ:
        return
    temporary = Path(next((os.environ[name] for name in _VARIABLES if name in os.environ), "/tmp"))
    try:
        _try(temporary)
        return
    except (OSError, RuntimeError) as e:
        problem = f"{temporary}: {_first_line(e)}"
    try:
        own = files.cache_folder() / "compiled"
        files.make_folder(own)
        os.environ["TMPDIR"] = str(own)
        _try(own)
    except (OSError, RuntimeError) as e:  # RuntimeError also where nobody knows the user's home
        os.environ["TMPDIR"] = str(temporary)
        _stop(f"{problem}; the user's cache: {_first_line(e)}")
    else:
        log.warning("fused operations are compiled in %s (%s)", own, problem)


def has_failed(error: Exception) -> bool:
    """Return whether `error` means that MLX could not compile, and stop compiling if it keeps failing.

    A test compilation decides: if it fails, too, or after MOST_FAILURES failures, nothing is compiled from here on,
    which is logged. The work that raised the error can be repeated.
    """
    global _failures
    if _FAILURES.search(str(error)) is None:
        return False
    _failures += 1
    try:
        _compile(1.0 + next(_constants) / 16)
        if _failures >= MOST_FAILURES:
            _stop(_first_line(error))
    except RuntimeError as e:
        _stop(_first_line(e))
    return True


def device_error(error: Exception) -> DeviceError:
    """Return the DeviceError that stands for `error` in a step. It says whether the step can be repeated."""
    again = has_failed(error)
    if not again:
        log.error("a step failed on the device", exc_info=error)
    return DeviceError(f"{type(error).__name__}: {error}", again=again)


def _try(folder: Path) -> None:
    """Raise OSError or RuntimeError unless MLX can compile in `folder`, which it uses, and no other user can write
    there.
    """
    if not folder.is_dir():
        raise FileNotFoundError("there is no such folder")
    place = folder
    for part in ("mlx", version("mlx"), "cpu"):
        place /= part
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.stat(follow_symlinks=False)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{place} can be written by other users")
    trial = place / f".trial-{os.getpid()}"
    try:
        trial.write_bytes(b"\0" * ROOM)
    finally:
        trial.unlink(missing_ok=True)
    _compile_header(place)
    _compile(1.0)


def _compile_header(place: Path) -> None:
    """Compile HEADER in `place`, where MLX compiles, unless an earlier process did.

    Each fused operation then takes g++ 0.2 seconds instead of 0.9, and a first start needs dozens of them. g++ looks
    beside the operation's file before it looks in MLX's folder. It passes over a compiled header that it cannot use,
    so a failure here costs only time.
    """
    compiled = place / f"{HEADER}.gch"
    headers = Path(mx.__file__).parent / "include"
    if compiled.exists() or shutil.disk_usage(place).free < HEADER_ROOM:
        return
    new = compiled.with_suffix(f".{os.getpid()}")
    try:
        compiled.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        words = ["g++", *HEADER_FLAGS, "-I", str(headers), str(headers / HEADER), "-o", str(new)]
        subprocess.run(words, check=True, capture_output=True)
        new.replace(compiled)
    except (OSError, subprocess.CalledProcessError) as e:
        log.debug("the header of fused operations was not compiled: %s", e)
    finally:
        new.unlink(missing_ok=True)


def _compile(constant: float) -> None:
    """Have MLX compile a kernel that depends on `constant`, unless an earlier process did. Raise RuntimeError if it
    cannot.
    """
    mx.eval(mx.compile(lambda x: mx.exp(x) * constant + x)(mx.arange(4.0)))


def _stop(why: str) -> None:
    mx.disable_compile()
    log.warning("fused operations are not compiled, which makes steps slower: %s", why)


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(str(error).splitlines()), type(error).__name__)
