"""The program that runs checks: `python -m mlx_tandem.cli.doctor.child FD SIZES`, with one `module:function` per line
of input.

SIZES is a `Sizes` as JSON. The program answers each line with one line of JSON on the descriptor. Things that
it makes for one check, such as an engine, are kept for the next one.
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
from mlx_tandem.cli.doctor.result import Failed, NotHere, Outcome, Status
from mlx_tandem.cli.doctor.sizes import Sizes


class Answer(msgspec.Struct):
    """The result of one check; `detail` is the end of a traceback."""

    outcome: Outcome
    status: Status
    detail: str = ""


class Bench:
    """Things that checks share: `keep(name, make)` makes a thing once, and what is on `cleanup` is closed at the
    end. `sizes` is the amount of work of those checks that can do more or less.
    """

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.sizes = sizes or Sizes()
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
    status: Status = "failed"
    detail = ""
    try:
        found = getattr(importlib.import_module(module), function)(bench)
        status = "note" if found.advice else "ok"
    except NotHere as e:
        found, status = Outcome(str(e)), "skipped"
    except Failed as e:
        found = Outcome(e.says, e.figures, e.advice or explain(e.says))
    except Exception as e:
        trace = traceback.format_exc()
        found, detail = Outcome(f"{type(e).__name__}: {e}"[:500], {}, explain(trace)), trace[-2000:]
    # JSON has finite numbers only.
    figures = {k: v if isinstance(v, str) or math.isfinite(v) else str(v) for k, v in found.figures.items()}
    return Answer(msgspec.structs.replace(found, figures=figures), status, detail)


def main(fd: int, sizes: Sizes) -> None:
    """Answer the checks named on standard input, on descriptor `fd`."""
    bench = Bench(sizes)
    with os.fdopen(fd, "wb", buffering=0) as out, bench.cleanup:
        for line in sys.stdin:
            out.write(msgspec.json.encode(answer(line.strip(), bench)) + b"\n")
    if "mlx.core" in sys.modules:
        from mlx_tandem.model.device import leave_thread

        with suppress(RuntimeError):
            leave_thread()


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Sizes))
