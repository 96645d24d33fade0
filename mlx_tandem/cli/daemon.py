"""Servers in the background: start one and wait until it is ready, find it by its port, stop it.

Each server has a file in a folder of this user, with everything needed to find it and to start it again, but never
the API key.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mlx_tandem.cli.console import fail, say
from mlx_tandem.files import StorageError, cache_folder, check_writable, storage

DETACHED = "TANDEM_DETACHED"
"""Environment variable that tells a server that it runs in the background: the descriptor on which to say that it is
ready, the port that it must have (empty: that of its settings), and its log."""

LAST_WORD_SECONDS = 5.0
"""Seconds between the second SIGTERM, which ends streams, and SIGKILL."""

STOP_SECONDS = 30.0
"""Seconds in which a server that is ended during its start has to end."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

POLL_SECONDS = 0.05
"""Seconds between two checks of whether a server has ended."""


class State(msgspec.Struct, frozen=True):
    """The record of one background server, kept in a file."""

    pid: int
    born: str  # start time, which distinguishes it from a later process with the same number
    port: int
    argv: tuple[str, ...]  # the words after `tandem`
    cwd: str
    log: str
    key_variable: str | None  # environment variable that its key came from, if any


def folder() -> Path:
    """Return the folder of this user's servers, which nobody else can enter."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = _made(Path(runtime) / "mlx-tandem" if runtime else cache_folder() / "run")
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        fail(f"{path} is not a folder of yours")
    path.chmod(0o700)
    return path


def log_folder() -> Path:
    """Return the folder of the logs of this user's servers."""
    return _made(cache_folder() / "log")


def _made(path: Path) -> Path:
    """Return a folder, and make it if needed. End the process with one line and status 1 if it cannot be used."""
    try:
        with storage(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_writable(path / "any.file")
    except StorageError as e:
        fail(f"{e.message}; servers in the background need it: set XDG_CACHE_HOME or HOME to a folder of yours")
    return path


def _file(port: int) -> Path:
    return folder() / f"{port}.json"


def _write(state: State) -> None:
    file = _file(state.port)
    new = file.with_suffix(f".{os.getpid()}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(msgspec.json.encode(state))
    new.replace(file)


def states() -> list[State]:
    """Return the servers of this user that were not stopped, by their ports; a process may have ended by itself."""
    found = []
    for file in folder().glob("*.json"):
        with suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(file.read_bytes(), type=State))
    return sorted(found, key=lambda state: state.port)


def read(port: int) -> State:
    """Return the server on a port. End the process with one line and status 1 if none was started with --daemon."""
    try:
        return msgspec.json.decode(_file(port).read_bytes(), type=State)
    except (FileNotFoundError, msgspec.DecodeError):
        fail(f"no server that was started with --daemon is on port {port}")


def _remove(state: State) -> None:
    """Remove the file of this server, unless another server has put its own there."""
    file = _file(state.port)
    with suppress(OSError, msgspec.DecodeError):
        if msgspec.json.decode(file.read_bytes(), type=State) == state:
            file.unlink()


def born(pid: int) -> str:
    """Return when the process started, as this system writes it; empty if there is no such process."""
    with suppress(OSError):
        # On Linux it is field 22, after the name, which may hold any character. A zombie counts as ended.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else fields[18]
    if Path("/proc/self/stat").exists():
        return ""
    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False, env={"LC_ALL": "C"}
    )
    return shown.stdout.strip()


def alive(state: State) -> bool:
    """Return whether the server's process is there."""
    return bool(state.born) and born(state.pid) == state.born


# -- The server's side ------------------------------------------------------------------------------------------------


@dataclass
class Detached:
    """A background server's link to the command that started it."""

    fd: int
    port: int | None  # the port to use instead of that of the settings
    log: Path
    key_variable: str | None
    state: State | None = None

    @classmethod
    def from_environment(cls, key_variable: str | None) -> Detached | None:
        """Return the link of a background server; None for a server in the foreground."""
        said = os.environ.pop(DETACHED, None)
        if said is None:
            return None
        fd, port, log = said.split(":", 2)
        os.set_inheritable(int(fd), False)
        return cls(int(fd), int(port) if port else None, Path(log), key_variable)

    def ready(self, port: int, text: str) -> None:
        """Write the server's file, and release the command that started it with `text`, which it prints."""
        log = self.log.with_name(f"{port}.log")
        with suppress(FileNotFoundError):
            log.replace(log.with_name(f"{port}.before.log"))  # it may say why the previous server died
        self.log.replace(log)
        pid = os.getpid()
        self.state = State(pid, born(pid), port, tuple(sys.argv[1:]), os.getcwd(), str(log), self.key_variable)
        _write(self.state)
        text += f"  log       {log}\n  stop      tandem stop --port {port}\n"
        with suppress(BrokenPipeError), open(self.fd, "w", encoding="utf-8") as waiting:
            waiting.write(text)

    def end(self) -> None:
        """Remove the server's file."""
        if self.state is not None:
            _remove(self.state)


# -- The user's side ---------------------------------------------------------------------------------------------------


def start(argv: list[str], cwd: str | None = None, port: int | None = None) -> int:
    """Run `tandem ARGV` in the background and wait until it is ready or has ended; return the exit status.

    Print its Ready text, or its output if it failed. `port` overrides the port in ARGV. SIGINT and SIGTERM also stop
    the server that is starting.
    """
    folder()  # fails now rather than when the server is ready
    log = log_folder() / f"starting-{os.getpid()}.log"
    child: subprocess.Popen[bytes] | None = None
    ours, theirs = os.pipe()
    try:
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), "wb") as out, _interrupts():
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
        with open(ours, encoding="utf-8") as waiting:
            text = waiting.read()
        status = 0 if text else child.wait()
    except KeyboardInterrupt:
        if child is not None:
            _give_up(child)
        log.unlink(missing_ok=True)
        return INTERRUPTED
    if text:
        print(text, flush=True)
        return 0
    sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
    log.unlink()
    return status if status > 0 else 1


@contextmanager
def _interrupts() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back inside the block. From its end on each raises KeyboardInterrupt, at once if it came.

    They are not blocked, since the process that is started inside would inherit that. A signal that is ignored stays
    so. Only the main thread gets signals: in another one nothing is done.
    """
    came: list[int] = []
    held: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        held = [sign for sign in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(sign) is not signal.SIG_IGN]
    for sign in held:
        signal.signal(sign, lambda sign, _: came.append(sign))
    try:
        yield
    finally:
        for sign in held:
            signal.signal(sign, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _give_up(child: subprocess.Popen[bytes]) -> None:
    """End a server that has not said that it is ready, and say so. Another signal ends it at once."""
    try:
        say("stopping the server that was starting … (again: at once)")
        child.terminate()
        child.wait(STOP_SECONDS)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    say("nothing is running: the server was stopped before it was ready")


def stop(port: int, timeout: float) -> None:
    """End the server on `port`; running requests may finish within `timeout` seconds."""
    state = read(port)
    if not alive(state):
        _remove(state)
        print(f"the server on port {port} had ended already")
        return
    _end(state, timeout)
    print(f"stopped the server on port {port}")


def restart(port: int, timeout: float) -> int:
    """End the server on `port` and start it again with the same arguments and folder; return the exit status."""
    state = read(port)
    if state.key_variable is not None and not os.environ.get(state.key_variable):
        fail(f"the server on port {port} has its key from {state.key_variable}, which is not set here")
    if alive(state):
        _end(state, timeout)
    status = start(list(state.argv), state.cwd, port)
    if status and not _file(port).exists():
        _write(state)  # so that another attempt knows how it was started
    return status


def _end(state: State, timeout: float) -> None:
    for sign, patience in ((signal.SIGTERM, timeout), (signal.SIGTERM, LAST_WORD_SECONDS), (signal.SIGKILL, 60.0)):
        with suppress(ProcessLookupError):
            os.kill(state.pid, sign)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not alive(state):
                _remove(state)
                return
            time.sleep(POLL_SECONDS)
    fail(f"the server on port {state.port} (process {state.pid}) does not end")
