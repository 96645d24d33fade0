"""Running what documents show: servers by their command lines, and curl as far as the pages use it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def curl(words: Sequence[str], port: int) -> bytes:
    """What curl would do with the few options that the pages use, on `port`. Raises HTTPError on a status over 299."""
    method, url, headers, data = None, "", {}, None
    rest = iter(words[1:])
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif word == "-d":
            data = next(rest).encode()
        elif not word.startswith("-"):
            url = word
        else:
            assert word == "-N", f"an option this test does not know: {word}"
    for printed in (":8000", ":8080"):
        url = url.replace(printed, f":{port}")
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as reply:
        content: bytes = reply.read()
    return content


class running:
    """A server that is ready inside the block, started by `words` in the folder `where`; `log` gets what it prints."""

    def __init__(
        self,
        words: Sequence[str],
        port: int,
        where: Path,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ):
        self._words, self.port, self._where, self._log = words, port, where, log
        self._env = (os.environ if env is None else env) | {"PYTHONPATH": str(ROOT)}

    def __enter__(self) -> running:
        with self._log.open("w+b") if self._log else tempfile.TemporaryFile() as said:
            self.process = subprocess.Popen(self._words, cwd=self._where, stdout=said, stderr=said, env=self._env)
            deadline = time.monotonic() + 90
            while time.monotonic() < deadline and self.process.poll() is None:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                        return self
                except (urllib.error.URLError, ConnectionError, TimeoutError):
                    time.sleep(0.1)
            why = "ended by itself" if self.process.poll() is not None else "was not ready after 90 s"
            status = self.stop()
            said.seek(0)
            text = said.read().decode(errors="replace")[-4000:]
        raise AssertionError(f"{' '.join(self._words)} {why} (status {status}), and printed:\n{text}")

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> int:
        """End it by SIGTERM; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            finally:
                self.process.kill()
        return self.process.wait()
