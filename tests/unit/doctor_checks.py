"""Checks that end in every way a check can, for the process that runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.cli.doctor.result import Failed, NotHere, Outcome


def well(bench: Bench) -> Outcome:
    return Outcome("all is well", {"number": 1.5, "infinite": float("inf")})


def advises(bench: Bench) -> Outcome:
    return Outcome("slow", advice="do this")


def counts(bench: Bench) -> Outcome:
    made: list[int] = bench.keep("made", list)
    made.append(1)
    return Outcome(f"{len(made)}")


def fails(bench: Bench) -> Outcome:
    raise Failed(f"wrong in {Path.home()}/models/mine and in /srv/secret/place", "mend it")


def raises(bench: Bench) -> Outcome:
    print("a word before it", file=sys.stderr)
    raise ImportError("Library not loaded: @rpath/libmlx.dylib")


def dies(bench: Bench) -> Outcome:
    print("libc++abi: terminating: [METAL] Failed to load the default metallib. library not found", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGABRT)
    raise AssertionError("not reached")


def leaves(bench: Bench) -> Outcome:
    os._exit(3)


def hangs(bench: Bench) -> Outcome:
    threading.Event().wait()
    raise AssertionError("not reached")


def leaves_another(bench: Bench) -> Outcome:
    """Start a process that does not end by itself, write its number into a file, and hang."""
    other = subprocess.Popen(["sleep", "3600"])
    Path(os.environ["DOCTOR_OTHER"]).write_text(str(other.pid))
    return hangs(bench)


def tells_its_process(bench: Bench) -> Outcome:
    return Outcome(f"{os.getpid()} {os.environ.get('DOCTOR_WORD')} {bench.sizes.overlaps}")


def is_of_macos(bench: Bench) -> Outcome:
    raise NotHere("only Macs have this")


def broken_kernel(bench: Bench) -> Outcome:
    """The check of attention, with a back end more that is wrong by a twentieth."""
    from mlx_tandem.cli.doctor import device
    from mlx_tandem.model.ops.attention import cases

    cases.BACKENDS["broken"] = lambda case: cases.BACKENDS["portable"](case) * 1.05
    return device.attention(bench)
