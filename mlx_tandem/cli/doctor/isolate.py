"""Runs checks in a process of their own: one that dies or hangs is a finding, and the next check gets a new process."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import msgspec

from mlx_tandem.cli.doctor.child import Answer
from mlx_tandem.cli.doctor.known import explain
from mlx_tandem.cli.doctor.result import Check, Finding, Status
from mlx_tandem.engine.client.ending import explain_end


def run(checks: Sequence[Check], tell: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Run all checks in order and return a finding for each. `tell` is given each name before its check begins."""
    found: dict[str, Finding] = {}
    child: _Child | None = None
    try:
        for check in checks:
            if check.needs in found and found[check.needs].status in ("failed", "skipped"):
                says = f"not run, because '{check.needs}' was not well"
                found[check.name] = Finding(check.name, check.meaning, "skipped", says)
                continue
            tell(check.name)
            child = child or _Child()
            found[check.name] = child.check(check)
            if child.gone:
                child.close()
                child = None
    finally:
        if child is not None:
            child.close()
    return list(found.values())


class _Child:
    """A process that runs one check after the other."""

    def __init__(self) -> None:
        self.gone = False
        self._read, write = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        # Float32 products must not be computed in TF32 on GPUs that have it, since float32 is what is compared.
        environment = os.environ | {"MLX_ENABLE_TF32": "0", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlx_tandem.cli.doctor.child", str(write)],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=(write,),
            env=environment,
        )
        os.close(write)

    def check(self, check: Check) -> Finding:
        """Run a check, and return what it found, or how the process ended."""
        started = time.monotonic()
        self._errors.seek(0)  # the child shares the position
        self._errors.truncate()
        assert self._process.stdin is not None
        line = b""
        try:
            self._process.stdin.write(check.run.encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(started + check.seconds)
        except BrokenPipeError:
            pass
        seconds = round(time.monotonic() - started, 2)
        if not line.endswith(b"\n"):
            self.gone = True
            says, advice, detail = self._why(seconds >= check.seconds, check.seconds)
            return Finding(check.name, check.meaning, "failed", says, advice, {}, detail, seconds)
        answer = msgspec.json.decode(line, type=Answer)
        found, advice, detail = answer.outcome, answer.outcome.advice, answer.detail
        status: Status = "failed" if answer.failed else "note" if advice else "ok"
        if answer.failed:  # an engine writes to standard error why it did not start
            written = self._written()
            advice, detail = advice or explain(written), f"{detail}\n{written}".strip()
        return Finding(check.name, check.meaning, status, found.says, advice, found.figures, detail, seconds)

    def _written(self) -> str:
        """Return the end of what this check has written to standard output and standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").strip()

    def _line(self, deadline: float) -> bytes:
        """Return the process's answer; it lacks the final newline if it did not come until the deadline."""
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                break
            more = os.read(self._read, 65536)
            if not more:
                break
            line += more
        return line

    def _why(self, late: bool, seconds: float) -> tuple[str, str, str]:
        if late:
            self._process.kill()
            self._process.wait()
            ended, advice = f"did not end within {seconds:g} s and was stopped", ""
        else:
            try:
                status = self._process.wait(10)
            except subprocess.TimeoutExpired:  # the process closed its end but hangs while it exits
                self._process.kill()
                status = self._process.wait()
            ended, advice = explain_end(status)
            ended = f"the process of this check {ended}"
        detail = self._written()
        return ended, explain(detail) or advice, detail

    def close(self) -> None:
        """Let the process end by itself within a short time, else kill it."""
        assert self._process.stdin is not None
        with closing(self._errors):
            try:
                self._process.stdin.close()
                self._process.wait(10)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
            finally:
                os.close(self._read)
