"""Servers in the background: starting one and waiting until it is ready, finding it by its port, stopping it.

Each has a file in a folder of this user's, with what it takes to find and to start it again, but never the API key.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mlx_tandem.cli.console import fail
from mlx_tandem.files import cache_folder

DETACHED = "TANDEM_DETACHED"
"""How a server learns that it is one of these: the descriptor to be ready on, the port that it must have (empty: what
its settings say), and its log."""

LAST_WORD_SECONDS = 5.0  # between the second SIGTERM, which ends streams, and SIGKILL
POLL_SECONDS = 0.05


class State(msgspec.Struct, frozen=True):
    """One background server."""

    pid: int
    born: str  # tells it from a later process with the same number
    port: int
    argv: tuple[str, ...]  # behind `tandem`
    cwd: str
    log: str
    key_variable: str | None  # where its key came from, when that was the environment


def folder() -> Path:
    """This user's, that nobody else can enter."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "mlx-tandem" if runtime else cache_folder() / "run"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        fail(f"{path} is not a folder of yours")
    path.chmod(0o700)
    return path


def _file(port: int) -> Path:
    return folder() / f"{port}.json"


def _write(state: State) -> None:
    file = _file(state.port)
    new = file.with_suffix(f".{os.getpid()}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(msgspec.json.encode(state))
    new.replace(file)


def _read(port: int) -> State:
    try:
        return msgspec.json.decode(_file(port).read_bytes(), type=State)
    except (FileNotFoundError, msgspec.DecodeError):
        fail(f"no server that was started with --daemon is on port {port}")


def born(pid: int) -> str:
    """When the process started, as this system writes it; empty when there is none."""
    with suppress(OSError):
        # Linux: field 22, behind the name, which may hold anything. A zombie has ended.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else fields[18]
    if Path("/proc/self/stat").exists():
        return ""
    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False, env={"LC_ALL": "C"}
    )
    return shown.stdout.strip()


def _alive(state: State) -> bool:
    return bool(state.born) and born(state.pid) == state.born


# -- the server's side ------------------------------------------------------------------------------------------------


@dataclass
class Detached:
    """What a background server does beside serving."""

    fd: int
    port: int | None  # in place of that of the settings
    log: Path
    key_variable: str | None
    state: State | None = None

    @classmethod
    def from_environment(cls, key_variable: str | None) -> Detached | None:
        """None for a server in the foreground."""
        said = os.environ.pop(DETACHED, None)
        if said is None:
            return None
        fd, port, log = said.split(":", 2)
        os.set_inheritable(int(fd), False)
        return cls(int(fd), int(port) if port else None, Path(log), key_variable)

    def ready(self, port: int, text: str) -> None:
        """Leave the file and let go of whoever started this."""
        log = self.log.with_name(f"{port}.log")
        with suppress(FileNotFoundError):
            log.replace(log.with_name(f"{port}.before.log"))  # it may say why the last one died
        self.log.replace(log)
        pid = os.getpid()
        self.state = State(pid, born(pid), port, tuple(sys.argv[1:]), os.getcwd(), str(log), self.key_variable)
        _write(self.state)
        text += f"  log       {log}\n  stop      tandem stop --port {port}\n"
        with suppress(BrokenPipeError), open(self.fd, "w", encoding="utf-8") as waiting:
            waiting.write(text)

    def end(self) -> None:
        """Take the file away unless another server has put its own there."""
        if self.state is not None:
            file = _file(self.state.port)
            with suppress(OSError, msgspec.DecodeError):
                if msgspec.json.decode(file.read_bytes(), type=State) == self.state:
                    file.unlink()


# -- the user's side ---------------------------------------------------------------------------------------------------


def start(argv: list[str], cwd: str | None = None, port: int | None = None) -> int:
    """Run `tandem ARGV` in the background and wait until it is ready or has ended; the exit status. `port` weighs more
    than what ARGV says.

    Then its Ready text is printed, or, when it failed, what it said.
    """
    logs = cache_folder() / "log"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = logs / f"starting-{os.getpid()}.log"
    ours, theirs = os.pipe()
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), "wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlx_tandem", *argv],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=(theirs,),
            start_new_session=True,
            env=os.environ | {DETACHED: f"{theirs}:{'' if port is None else port}:{log}"},
        )
    os.close(theirs)
    try:
        with open(ours, encoding="utf-8") as waiting:
            text = waiting.read()
    except KeyboardInterrupt:
        child.terminate()
        text = ""
    if text:
        print(text, flush=True)
        return 0
    status = child.wait()
    sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
    log.unlink()
    return status if status > 0 else 1


def stop(port: int, timeout: float) -> None:
    """End the server on `port`: what runs may finish within `timeout` seconds."""
    state = _read(port)
    if not _alive(state):
        _file(port).unlink(missing_ok=True)
        print(f"the server on port {port} had ended already")
        return
    _end(state, timeout)
    print(f"stopped the server on port {port}")


def restart(port: int, timeout: float) -> int:
    """End the server on `port` and start it again with the same arguments, where it was started; the exit status."""
    state = _read(port)
    if state.key_variable is not None and not os.environ.get(state.key_variable):
        fail(f"the server on port {port} has its key from {state.key_variable}, which is not set here")
    if _alive(state):
        _end(state, timeout)
    status = start(list(state.argv), state.cwd, port)
    if status:
        _write(state)  # another attempt knows how it was started
    return status


def _end(state: State, timeout: float) -> None:
    for sign, patience in ((signal.SIGTERM, timeout), (signal.SIGTERM, LAST_WORD_SECONDS), (signal.SIGKILL, 60.0)):
        with suppress(ProcessLookupError):
            os.kill(state.pid, sign)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not _alive(state):
                _file(state.port).unlink(missing_ok=True)
                return
            time.sleep(POLL_SECONDS)
    fail(f"the server on port {state.port} (process {state.pid}) does not end")
