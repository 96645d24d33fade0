"""Servers in the background: `tandem serve --daemon`, `tandem stop`, `tandem restart`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from mlx_tandem import demo
from mlx_tandem.cli import daemon
from tests.privileges import drop_privileges
from tests.waiting import until

pytestmark = pytest.mark.restarts

SECRET = "sk-of-this-test-only"


@dataclass
class Machine:
    """A user with a runtime folder and a cache of its own."""

    home: Path

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.endswith(("API_KEY", "API_KEY_FILE"))}
        return kept | {"XDG_RUNTIME_DIR": str(self.home), "XDG_CACHE_HOME": str(self.home / "cache")}

    def tandem(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mlx_tandem", *args],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=self.env | env,
            cwd=self.home,
        )

    def start(self, *args: str, called_as: str = "tandem", **env: str) -> tuple[str, str]:
        """The port, as a word, and what was printed."""
        done = self.tandem(
            "--called-as",
            called_as,
            "serve",
            "--daemon",
            "--max-model-len",
            "1024",
            "--num-blocks",
            "512",
            *args,
            **env,
        )
        assert done.returncode == 0, done.stderr
        found = re.search(r"^Ready: http://127.0.0.1:(\d+)$", done.stdout, re.MULTILINE)
        assert found, done.stdout
        return found[1], done.stdout

    def files(self) -> list[Path]:
        return sorted((self.home / "mlx-tandem").glob("*.json"))

    def state(self) -> daemon.State:
        (file,) = self.files()
        return msgspec.json.decode(file.read_bytes(), type=daemon.State)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for file in made.files():
        state = msgspec.json.decode(file.read_bytes(), type=daemon.State)
        if daemon.born(state.pid) == state.born:
            os.kill(state.pid, signal.SIGKILL)


def engine_pid(server: int) -> int:
    found = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    (pid,) = [
        int(pid)
        for pid, parent, args in (line.split(None, 2) for line in found.splitlines())
        if int(parent) == server and "mlx_tandem.engine_main" in args
    ]
    return pid


def children(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid, its in map(str.split, found.splitlines()) if int(its) == parent]


def models(port: str, key: str = "") -> list[str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=30) as reply:
        return [model["id"] for model in json.load(reply)["data"]]


def test_start_restart_stop(machine: Machine) -> None:
    (machine.home / "my-adapter").symlink_to(demo.ADAPTER_PATHS["shout"])
    args = ("--port", "0", "--served-model-name", "little", "--adapter", "mine", "./my-adapter", "--kv-bits", "8")
    port, text = machine.start(*args, TANDEM_API_KEY=SECRET)
    assert models(port, SECRET) == ["little", "mine"]
    assert f"stop      tandem stop --port {port}" in text

    first = machine.state()
    assert (first.port, first.cwd, first.key_variable) == (int(port), str(machine.home), "TANDEM_API_KEY")
    assert "--daemon" not in first.argv
    (file,) = machine.files()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(Path(first.log).stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    log = Path(first.log).read_text()
    assert "adapter loaded" in log
    assert SECRET not in log + file.read_text() + text

    refused = machine.tandem("restart", "--port", port)
    assert refused.returncode == 1
    assert "has its key from TANDEM_API_KEY, which is not set here" in refused.stderr
    assert models(port, SECRET)

    again = machine.tandem("restart", "--port", port, TANDEM_API_KEY="another-key")
    assert again.returncode == 0, again.stderr
    assert f"Ready: http://127.0.0.1:{port}\n" in again.stdout
    assert models(port, "another-key") == ["little", "mine"]
    second = machine.state()
    assert second.pid != first.pid
    assert not daemon.born(first.pid)

    done = machine.tandem("stop", "--port", port)
    assert (done.returncode, done.stdout) == (0, f"stopped the server on port {port}\n")
    assert not daemon.born(second.pid)
    assert not machine.files()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))


def test_a_server_that_died_can_be_restarted(machine: Machine) -> None:
    (machine.home / "my-model").symlink_to(demo.MODEL_PATH)
    port, _ = machine.start("--port", "0", "--", "my-model")
    state = machine.state()
    os.kill(state.pid, signal.SIGKILL)
    log = Path(state.log)
    log.write_text("why it died\n")
    done = machine.tandem("restart", "--port", port)
    assert done.returncode == 0, done.stderr
    assert models(port) == [demo.MODEL_PATH.name]
    assert log.with_name(f"{port}.before.log").read_text().startswith("why it died\n")
    assert "why it died" not in log.read_text()
    assert machine.state().argv == state.argv
    os.kill(machine.state().pid, signal.SIGKILL)
    done = machine.tandem("stop", "--port", port)
    assert (done.returncode, done.stdout) == (0, f"the server on port {port} had ended already\n")
    assert not machine.files()


def test_a_server_that_ended_with_its_engine_can_be_restarted(machine: Machine) -> None:
    model = machine.home / "my-model"
    shutil.copytree(demo.MODEL_PATH, model)
    port, _ = machine.start("my-model", "--port", "0")
    state = machine.state()
    (model / "config.json").rename(model / "elsewhere")
    os.kill(engine_pid(state.pid), signal.SIGKILL)  # the next one cannot be started any more
    until(lambda: not daemon.born(state.pid))
    (model / "elsewhere").rename(model / "config.json")
    done = machine.tandem("restart", "--port", port)
    assert done.returncode == 0, done.stderr
    assert models(port) == ["my-model"]


def test_a_server_by_another_program_s_name(machine: Machine) -> None:
    """What it was called outlives a restart, and ends as it is stopped."""
    port, _ = machine.start("--port", "0", called_as="mlx-server")
    assert models(port)[1] == "model"
    assert machine.tandem("restart", "--port", port).returncode == 0
    assert models(port)[1] == "model"
    os.kill(machine.state().pid, signal.SIGTERM)
    until(lambda: not machine.files())


def test_what_fails_is_said_as_in_the_foreground(machine: Machine) -> None:
    broken = machine.home / "broken"
    broken.mkdir()
    for source in demo.MODEL_PATH.iterdir():
        if source.name != "model.safetensors":
            (broken / source.name).symlink_to(source)
    for model, said in ((str(broken), "model.safetensors is missing"), ("nowhere", "there is no model folder nowhere")):
        foreground = machine.tandem("serve", model, "--port", "0")
        background = machine.tandem("serve", model, "--port", "0", "--daemon")
        assert (background.returncode, background.stdout) == (foreground.returncode, "") == (1, "")
        last = background.stderr.splitlines()[-1]
        assert last == foreground.stderr.splitlines()[-1]
        assert last.startswith("tandem: ")
        assert said in last
    assert not machine.files()
    assert not [*(machine.home / "cache").rglob("*.log")]


@pytest.mark.skipif(sys.platform != "linux", reason="drops privileges by Linux's capabilities")
def test_a_user_without_a_home_is_told_before_anything_is_started(machine: Machine) -> None:
    closed = machine.home / "closed"
    closed.mkdir(mode=0o500)
    variables = ("HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
    env = {name: value for name, value in machine.env.items() if name not in variables}
    for words in (("serve", "nowhere", "--daemon", "--port", "0"), ("stop",), ("restart",)):
        done = subprocess.run(
            [sys.executable, "-m", "mlx_tandem", *words],
            capture_output=True, text=True, check=False, env=env | {"HOME": str(closed)}, preexec_fn=drop_privileges,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"tandem: {closed}/.cache/mlx-tandem/run cannot be used ({closed}/.cache): Permission denied; "
            "servers in the background need it: set XDG_CACHE_HOME or HOME to a folder of yours\n"
        )


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_it_starts_leaves_nothing(machine: Machine, times: int) -> None:
    """Neither a process nor a file; the command says that it stops the server, and what holds then."""
    words = [sys.executable, "-m", "mlx_tandem", "serve", "--daemon", "--port", "0", "--max-model-len", "1024"]
    with subprocess.Popen(words, env=machine.env, cwd=machine.home, stderr=subprocess.PIPE, text=True) as run:
        logs = machine.home / "cache" / "mlx-tandem" / "log"
        until(lambda: any("checking the model" in log.read_text() for log in logs.glob("starting-*.log")))
        (server,) = children(run.pid)
        engine = engine_pid(server)
        assert run.stderr is not None
        run.send_signal(signal.SIGINT)
        said = run.stderr.readline()
        if times == 2:
            run.send_signal(signal.SIGINT)
        said += run.stderr.read()
    assert run.returncode == 130
    assert said.splitlines() == [
        "tandem: stopping the server that was starting … (again: at once)",
        "tandem: nothing is running: the server was stopped before it was ready",
    ]
    until(lambda: not daemon.born(server) and not daemon.born(engine))
    assert not machine.files() and not [*logs.iterdir()]


def test_another_process_with_the_number_is_left_alone(machine: Machine) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        folder = machine.home / "mlx-tandem"
        folder.mkdir()
        state = daemon.State(other.pid, "before", 8000, ("serve",), str(machine.home), "", None)
        (folder / "8000.json").write_bytes(msgspec.json.encode(state))
        assert machine.tandem("stop").stdout == "the server on port 8000 had ended already\n"
        assert daemon.born(other.pid)
        assert other.poll() is None
        other.communicate(b"\n")


@pytest.mark.parametrize("command", ["stop", "restart"])
def test_nothing_to_stop(machine: Machine, command: str) -> None:
    done = machine.tandem(command, "--port", "8123")
    assert done.returncode == 1
    assert done.stderr == "tandem: no server that was started with --daemon is on port 8123\n"


def test_a_folder_of_somebody_else_is_not_used(machine: Machine) -> None:
    target = machine.home / "elsewhere"
    target.mkdir()
    (machine.home / "mlx-tandem").symlink_to(target)
    done = machine.tandem("stop")
    assert done.returncode == 1
    assert "is not a folder of yours" in done.stderr


def test_birth_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        birth = daemon.born(child.pid)
        assert birth
        assert birth == daemon.born(child.pid) != daemon.born(os.getpid())
        child.communicate(b"\n")
    assert daemon.born(child.pid) == ""


def test_servers_are_listed_and_their_logs_shown(machine: Machine) -> None:
    assert machine.tandem("ps").stdout == "no server runs in the background (tandem serve --daemon starts one)\n"
    assert machine.tandem("ps", "--json").stdout == "[]\n"
    port, _ = machine.start("--port", "0")
    state = machine.state()
    [listed] = json.loads(machine.tandem("ps", "--json").stdout)
    assert listed == {
        "port": int(port),
        "pid": state.pid,
        "state": "ok",
        "command": " ".join(("tandem", *state.argv)),
        "log": state.log,
    }
    shown = machine.tandem("ps").stdout
    assert f" {port} " in shown
    assert " ok " in shown
    whole = Path(state.log).read_text(encoding="utf-8")
    assert machine.tandem("logs", "--port", port).stdout == "".join(whole.splitlines(keepends=True)[-100:])
    assert machine.tandem("logs", "--port", port, "-n", "1").stdout == whole.splitlines(keepends=True)[-1]
    words = [sys.executable, "-m", "mlx_tandem", "logs", "-f", "-n", "1", "--port", port]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=machine.env) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == whole.splitlines(keepends=True)[-1]
        os.kill(state.pid, signal.SIGKILL)
        until(lambda: daemon.born(state.pid) != state.born)
        following.stdout.read()
        assert following.wait(30) == 0, "it ends with the server"
    [listed] = json.loads(machine.tandem("ps", "--json").stdout)
    assert listed["state"] == "ended"
    assert machine.tandem("stop", "--port", port).returncode == 0
    assert json.loads(machine.tandem("ps", "--json").stdout) == []
