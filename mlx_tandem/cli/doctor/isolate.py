"""Runs checks in a process of their own: one that dies or hangs is a finding, and the next check gets a new process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress

import msgspec

from mlx_tandem.cli.doctor.child import Answer
from mlx_tandem.cli.doctor.known import explain
from mlx_tandem.cli.doctor.result import Check, Finding
from mlx_tandem.cli.doctor.sizes import Sizes
from mlx_tandem.engine.client.ending import explain_end

Tell = Callable[[Check, float], None]
"""Function that is given a check and its seconds so far: 0 before it begins, then about once a second."""


def run(checks: Sequence[Check], tell: Tell = lambda check, seconds: None) -> list[Finding]:
    """Run all checks in order and return a finding for each."""
    return list(each(checks, tell))


def each(
    checks: Sequence[Check],
    tell: Tell = lambda check, seconds: None,
    sizes: Sizes | None = None,
    seconds: float = float("inf"),
) -> Iterator[Finding]:
    """Run the checks in order and yield a finding for each. The checks that are left when the time is over are skipped.

    When the caller closes this generator, or is interrupted, the process of the check that runs is killed.
    """
    found: dict[str, Finding] = {}
    child: _Child | None = None
    deadline = time.monotonic() + seconds
    try:
        for check in checks:
            left = deadline - time.monotonic()
            if why := _reason_to_skip(check, found, left):
                found[check.name] = Finding(check.name, check.meaning, "skipped", why)
                yield found[check.name]
                continue
            tell(check, 0.0)
            if child is not None and check.alone:
                child.close()
                child = None
            child = child or _Child(check.environment, sizes or Sizes())
            found[check.name] = child.check(check, min(check.seconds, left), tell)
            if child.gone or check.alone:
                child.close()
                child = None
            yield found[check.name]
    except BaseException:
        if child is not None:
            child.kill()
        raise
    finally:
        if child is not None:
            child.close()


def _reason_to_skip(check: Check, found: Mapping[str, Finding], left: float) -> str:
    """Return why a check is not run; empty if it is."""
    if check.needs in found and found[check.needs].status in ("failed", "skipped"):
        return f"not run, because '{check.needs}' was not well"
    return "" if left > 0 else "not run, because the time was up"


class _Child:
    """A process that runs one check after the other. It forms a process group with the processes that it starts."""

    def __init__(self, environment: Mapping[str, str], sizes: Sizes) -> None:
        self.gone = False
        self._read, write = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        # Float32 products must not be computed in TF32 on GPUs that have it, since float32 is what is compared.
        variables = {**os.environ, "MLX_ENABLE_TF32": "0", "PYTHONUNBUFFERED": "1", **environment}
        program = [sys.executable, "-P", "-m", "mlx_tandem.cli.doctor.child", str(write)]
        self._process = subprocess.Popen(
            [*program, msgspec.json.encode(sizes).decode()],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=(write,),
            env=variables,
            start_new_session=True,
        )
        os.close(write)

    def check(self, check: Check, most: float, tell: Tell) -> Finding:
        """Run a check for at most `most` seconds, and return its finding, or how the process ended."""
        started = time.monotonic()
        self._errors.seek(0)  # the child shares the position
        self._errors.truncate()
        assert self._process.stdin is not None
        line = b""
        try:
            self._process.stdin.write(check.run.encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(started + most, lambda: tell(check, time.monotonic() - started))
        except BrokenPipeError:
            pass
        seconds = round(time.monotonic() - started, 2)
        if not line.endswith(b"\n"):
            self.gone = True
            says, advice, detail = self._why(seconds >= most, most)
            return Finding(check.name, check.meaning, "failed", says, advice, {}, detail, seconds)
        answer = msgspec.json.decode(line, type=Answer)
        found, advice, detail = answer.outcome, answer.outcome.advice, answer.detail
        if answer.status == "failed":  # an engine writes to standard error why it did not start
            written = self._written()
            advice, detail = advice or explain(written), f"{detail}\n{written}".strip()
        figures, table = found.figures, found.table
        return Finding(check.name, check.meaning, answer.status, found.says, advice, figures, detail, seconds, table)

    def _written(self) -> str:
        """Return the end of what this check has written to standard output and standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").strip()

    def _line(self, deadline: float, tick: Callable[[], None]) -> bytes:
        """Return the process's answer. Without a final newline the answer was not complete at the deadline.

        `tick` is called about once a second.
        """
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not select.select([self._read], [], [], min(left, 1.0))[0]:
                tick()
                continue
            more = os.read(self._read, 65536)
            if not more:
                break
            line += more
        return line

    def _why(self, late: bool, seconds: float) -> tuple[str, str, str]:
        if late:
            self.kill()
            ended, advice = f"did not end within {seconds:.3g} s and was stopped", ""
        else:
            try:
                status = self._process.wait(10)
            except subprocess.TimeoutExpired:  # the process closed its end but hangs while it exits
                status = self.kill()
            ended, advice = explain_end(status)
            ended = f"the process of this check {ended}"
        detail = self._written()
        return ended, explain(detail) or advice, detail

    def kill(self) -> int:
        """Kill the process and those that it has started; return the status with which it ended."""
        with suppress(ProcessLookupError, PermissionError):  # all of its processes have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def close(self) -> None:
        """Let the process end by itself within a short time, else kill it."""
        assert self._process.stdin is not None
        with closing(self._errors):
            try:
                self._process.stdin.close()
                self._process.wait(10)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                pass
            finally:
                self.kill()
                os.close(self._read)
