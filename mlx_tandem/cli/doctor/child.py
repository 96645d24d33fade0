"""The program that runs checks: `python -m mlx_tandem.cli.doctor.child FD`, with one `module:function` per line of
input.

It answers each with one line of JSON on the descriptor. What it makes for one check, such as an engine, is kept for
the next.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from mlx_tandem.cli.doctor.known import explain
from mlx_tandem.cli.doctor.result import Failed, Outcome


class Answer(msgspec.Struct):
    """The result of one check; `failed` says whether it has failed, `detail` is the end of a traceback."""

    outcome: Outcome
    failed: bool = False
    detail: str = ""


class Bench:
    """Things that checks share: `keep(name, make)` makes a thing once, and what is on `cleanup` is closed at the
    end.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self.cleanup = ExitStack()

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the thing `name`, made by `make` the first time."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]


def answer(run: str, bench: Bench) -> Answer:
    """Run one check. Whatever it raises is a failure, which is explained if it is known."""
    module, _, function = run.partition(":")
    try:
        found, failed, detail = getattr(importlib.import_module(module), function)(bench), False, ""
    except Failed as e:
        found, failed, detail = Outcome(e.says, e.figures, e.advice or explain(e.says)), True, ""
    except Exception as e:
        trace = traceback.format_exc()
        found, failed, detail = Outcome(f"{type(e).__name__}: {e}"[:500], {}, explain(trace)), True, trace[-2000:]
    # JSON has finite numbers only.
    figures = {k: v if isinstance(v, str) or math.isfinite(v) else str(v) for k, v in found.figures.items()}
    return Answer(msgspec.structs.replace(found, figures=figures), failed, detail)


def main(fd: int) -> None:
    """Answer the checks named on standard input, on descriptor `fd`."""
    bench = Bench()
    with os.fdopen(fd, "wb", buffering=0) as out, bench.cleanup:
        for line in sys.stdin:
            out.write(msgspec.json.encode(answer(line.strip(), bench)) + b"\n")
    if "mlx.core" in sys.modules:
        from mlx_tandem.model.device import leave_thread

        with suppress(RuntimeError):
            leave_thread()


if __name__ == "__main__":
    main(int(sys.argv[1]))
