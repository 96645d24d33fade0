"""The command `tandem doctor --mac`: runs checks and stages, shows how far it is, and prints a block for an issue."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from mlx_tandem.cli.console import say
from mlx_tandem.cli.doctor import isolate, report
from mlx_tandem.cli.doctor.result import Check, Finding
from mlx_tandem.cli.doctor.sizes import Sizes

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

QUICK_SECONDS = 3.0
"""Most seconds that a stage usually takes in the smallest size."""

DETAIL = 10
"""Number of the last lines of a failed check's output that the block has."""


def examine(checks: Sequence[Check], model: Path | None, *, quick: bool) -> int:
    """Run the checks and print the block for an issue on standard output; return the exit status.

    The status is 1 if a check has failed, and INTERRUPTED after Ctrl-C. The block then has the results so far.
    """
    from mlx_tandem.cli.bench.machine import describe

    folder = "" if model is None else str(model.absolute())
    sizes = Sizes.least(folder) if quick else Sizes(folder)
    title = "tandem doctor --mac" + " --quick" * quick
    if sys.platform != "darwin":
        title += f" on {platform.system()}, which is not a Mac"
        say(f"this is not a Mac but {platform.system()}: what is of macOS or its GPU is skipped by name")
    if not quick:
        say("this takes about ten minutes, and at most twenty; Ctrl-C prints what is known by then")
    progress = Progress(checks, QUICK_SECONDS if quick else float("inf"))
    found: list[Finding] = []
    interrupted = False
    try:
        for finding in isolate.each(checks, progress.show, sizes, sizes.most):
            found.append(replace(finding, detail=_end(finding.detail)))
            progress.done(finding)
    except KeyboardInterrupt:
        interrupted = True
        known = {finding.check for finding in found}
        found += [
            Finding(check.name, check.meaning, "skipped", "not run: interrupted")
            for check in checks
            if check.name not in known
        ]
    progress.clear()
    data = report.data(title, describe(), found, [folder] if folder else [])
    print(report.folded(report.markdown(data)))
    return INTERRUPTED if interrupted else 0 if data["well"] else 1


class Progress:
    """Shows on standard error which check runs and how long the rest may take.

    On a terminal this is one line, which is rewritten each second; elsewhere it is one line for each check. `most`: an
    upper bound in seconds for the usual time of each check.
    """

    def __init__(self, checks: Sequence[Check], most: float):
        self._todo = {check.name: replace(check, usual=min(check.usual, most)) for check in checks}
        self._all = len(checks)
        self._screen = sys.stderr.isatty()

    def show(self, check: Check, seconds: float) -> None:
        """Show that a check has run for `seconds` seconds."""
        if seconds and not self._screen:
            return
        if not seconds and check.hint:
            self.clear()
            say(check.hint)
        left = sum(other.usual for other in self._todo.values()) - min(seconds, self._todo[check.name].usual)
        at = self._all - len(self._todo) + 1
        line = f"tandem: {at} of {self._all}, {check.name}: {seconds:.0f} s, {_rest(left)} left"
        if self._screen:
            self.clear()
        print(line, end="" if self._screen else "\n", file=sys.stderr, flush=True)

    def done(self, finding: Finding) -> None:
        """Note that a check has ended, and say so if it has failed."""
        self._todo.pop(finding.check)
        if finding.status == "failed":
            self.clear()
            say(f"{finding.check} has failed")

    def clear(self) -> None:
        """Empty the line on a terminal."""
        if self._screen:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _rest(seconds: float) -> str:
    """Return a duration in words."""
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {max(seconds, 1):.0f} s"


def _end(detail: str) -> str:
    """Return the last lines of what a process has written."""
    return "\n".join(detail.splitlines()[-DETAIL:])
