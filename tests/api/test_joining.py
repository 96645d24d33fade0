"""Joining a leader: what is found and fetched before a follower or trainer starts, and what is said meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from mlx_tandem import demo
from mlx_tandem.cli import joining, keys
from mlx_tandem.cli.joining import LEARNING, join
from mlx_tandem.cli.settings import build
from mlx_tandem.config import Config
from mlx_tandem.errors import EngineUnavailable
from mlx_tandem.server.sockets import unused_port
from mlx_tandem.training.cluster import bases
from mlx_tandem.training.cluster import leader as leaders
from mlx_tandem.training.cluster.client import LeaderClient
from mlx_tandem.training.cluster.folder import ClusterFolder
from mlx_tandem.training.cluster.joining import JOINED, Joined
from mlx_tandem.training.cluster.wire import Feed
from tests.fake_hub import Hub, fake_hub
from tests.leading import KEY, content, leading, published, shown
from tests.serving import ROOT, RunningServer
from tests.unit.cli_tools import tandem


@pytest.fixture(scope="module")
def leader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with leading(tmp_path_factory.mktemp("leader")) as server:
        yield server


@pytest.fixture
def client(leader: RunningServer) -> LeaderClient:
    return LeaderClient(leader.url, KEY)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a machine that joins."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def joined(leader: RunningServer, key: str = KEY, **options: Any) -> Config:
    return join(build(None, {"connect_to": leader.url.removeprefix("http://"), **options}), key)


def refusal(capsys: pytest.CaptureFixture[str], leader: RunningServer, key: str = KEY, **options: Any) -> str:
    """The line with which the command ends, after the one that says where it connects to."""
    with pytest.raises(SystemExit) as end:
        joined(leader, key, **options)
    first, line = capsys.readouterr().err.splitlines()
    assert (end.value.code, first) == (1, f"tandem: connecting to the leader at {leader.url}")
    return line


def test_the_base_is_found_by_its_digest(leader: RunningServer, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = joined(leader)
    assert Path(config.engine.model.path) == demo.MODEL_PATH
    assert config.adapters == ()
    assert "tandem-demo" in config.server.served_model_names
    copy = here / "models" / "base"
    shutil.copytree(demo.MODEL_PATH, copy)
    monkeypatch.setattr(demo, "MODEL_PATH", here / "nothing")
    shutil.rmtree(here / "cluster")
    assert Path(joined(leader).engine.model.path).resolve() == copy  # by its name, in the folder `models`
    copy.rename(here / "elsewhere")
    assert joined(leader, model="elsewhere").engine.model.path == "elsewhere"
    assert joined(leader).engine.model.path == "elsewhere"  # as the last time


def test_a_base_that_is_not_the_leader_s_is_refused(
    leader: RunningServer, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(demo.MODEL_PATH, here / "models" / "base")
    with (here / "models" / "base" / "config.json").open("a", encoding="utf-8") as file:
        file.write(" ")
    assert "is not the leader's base model base: its files differ (--model)" in refusal(
        capsys, leader, model="models/base"
    )
    monkeypatch.setattr(demo, "MODEL_PATH", here / "nothing")
    line = refusal(capsys, leader)
    assert "base model base is not on this machine: copy its folder to models/base, or name it with" in line
    assert refusal(capsys, leader, model="nowhere") == "tandem: there is no model folder nowhere"


def test_a_wrong_key_is_said(leader: RunningServer, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, leader, "wrong")
    assert "answers 401: a valid API key is needed" in line
    assert "set its key by TANDEM_API_KEY or --api-key-file (--connect-to)" in line


def test_a_trainer_begins_with_what_the_leader_serves(leader: RunningServer, client: LeaderClient, here: Path) -> None:
    published(leader, client, "down", 3)
    config = joined(leader, enable_rl_training=True)
    assert config.rl_training.init_from == "policy"
    ((name, folder),) = config.adapters
    assert name == "policy"
    for file in shown(leader, "down").files:
        assert (Path(folder) / file.name).read_bytes() == content("down", file)
    published(leader, client, "json", 2)
    assert joined(leader, enable_rl_training=True).adapters == config.adapters  # it has begun already
    known = ClusterFolder("cluster").read(JOINED, Joined)
    assert known is not None
    assert known.newest == 3
    shutil.rmtree("cluster")
    Path("checkpoints").mkdir()
    Path("checkpoints", LEARNING).touch()
    assert joined(leader, enable_rl_training=True).rl_training.init_from == ""  # it goes on with its own


def test_a_trainer_does_not_begin_with_other_content(
    leader: RunningServer,
    client: LeaderClient,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    published(leader, client, "down", 3)
    real = LeaderClient.feed

    async def forged(self: LeaderClient, *args: Any) -> Feed:
        found = await real(self, *args)
        changed = [replace(a, versions=tuple(replace(v, digest="c" * 64) for v in a.versions)) for a in found.adapters]
        return replace(found, adapters=tuple(changed))

    monkeypatch.setattr(LeaderClient, "feed", forged)
    line = refusal(capsys, leader, enable_rl_training=True)
    assert f"its content is {shown(leader, 'down').digest}, not {'c' * 64} (--connect-to)" in line
    assert ClusterFolder("cluster").digests() == []
    assert ClusterFolder("cluster").read(JOINED, Joined) is None


def test_a_machine_starts_again_without_its_leader(
    leader: RunningServer, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = joined(leader)
    folder = ClusterFolder("cluster")
    known = folder.read(JOINED, Joined)
    assert known is not None
    nobody = f"127.0.0.1:{unused_port()}"
    folder.write(JOINED, replace(known, url=f"http://{nobody}"))
    again = join(build(None, {"connect_to": nobody}), KEY)
    assert again.engine.model.path == config.engine.model.path
    said = capsys.readouterr().err
    assert f"no server answers at {nobody}: Connection refused; this server goes on with what it has from the" in said


@contextlib.contextmanager
def peer(answer: bytes) -> Iterator[str]:
    """The address of a program that is no leader: it answers anything with these bytes, or not at all if empty."""
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            if answer:
                self.request.sendall(answer)
            else:
                ended.wait()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        ended.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("command", [{}, {"enable_rl_training": True}], ids=["serve", "train rl"])
def test_waiting_for_a_leader_has_an_end(
    here: Path, capsys: pytest.CaptureFixture[str], command: dict[str, Any]
) -> None:
    """A port that nobody has, a name that nobody has, and a program that takes connections and says nothing."""
    for address in (f"127.0.0.1:{unused_port()}", "nobody.invalid:8000", ""):
        with peer(b"") as silent, pytest.raises(SystemExit) as end:
            address = address or silent
            join(build(None, {"connect_to": address, "wait_for_leader": 1.0, **command}), "")
        first, *_, last = capsys.readouterr().err.splitlines()
        assert (end.value.code, first) == (1, f"tandem: connecting to the leader at http://{address}")
        assert last.startswith("tandem: the leader has not answered within 1 s (--wait-for-leader): no ")
        assert address in last and last.endswith("(--connect-to)")


def test_a_machine_that_was_there_before_does_not_wait_long_for_a_silent_leader(
    leader: RunningServer, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    joined(leader)
    folder = ClusterFolder("cluster")
    known = folder.read(JOINED, Joined)
    assert known is not None
    monkeypatch.setattr(joining, "PATIENCE", 0.2)
    with peer(b"") as silent:
        folder.write(JOINED, replace(known, url=f"http://{silent}"))
        assert join(build(None, {"connect_to": silent}), KEY).engine.model.path == known.model
    assert f"no answer from http://{silent} within 0.2 s; this server goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheme", "answer", "said"),
    [
        ("", b"SSH-2.0-OpenSSH_9.6\r\n", "the answer is not HTTP"),
        ("https://", b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak TLS (WRONG_VERSION_NUMBER): try http://"),
        (
            "",
            b"HTTP/1.1 404 Not Found\r\ncontent-length: 3\r\n\r\n<p>",
            "404: this is no error of a leader",
        ),
        ("", b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n<p>", "the reply has another form"),
    ],
)
def test_an_address_of_something_else_is_said_at_once(
    here: Path, capsys: pytest.CaptureFixture[str], scheme: str, answer: bytes, said: str
) -> None:
    with peer(answer) as address, pytest.raises(SystemExit):
        join(build(None, {"connect_to": scheme + address}), "")
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith(address)
    assert said in last and last.endswith("(--connect-to)")


def test_a_server_that_does_not_lead_is_no_leader(
    server: RunningServer, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "start it with --share-model (--connect-to)" in refusal(capsys, server, "")


@pytest.mark.parametrize(
    ("command", "end"), [(["serve"], signal.SIGINT), (["train", "rl"], signal.SIGTERM)], ids=["serve", "train rl"]
)
def test_a_signal_ends_the_waiting(here: Path, command: list[str], end: signal.Signals) -> None:
    words = [sys.executable, "-m", "mlx_tandem", *command, "--port", "0", "--connect-to", f"127.0.0.1:{unused_port()}"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=here, env=env, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        while "waiting for the leader for at most 600 s" not in waiting.stderr.readline():
            assert waiting.poll() is None
        waiting.send_signal(end)
        assert waiting.wait(30) in (130, -end)
        assert "Traceback" not in waiting.stderr.read()


def test_a_leader_that_reads_its_base_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    front: Any = SimpleNamespace(
        config=build(None, {"share_model": True, "cluster_dir": str(here / "cluster")}),
        models=SimpleNamespace(id="base", served_names=()),
    )

    async def work() -> None:
        one, read = leaders.Leader(front), asyncio.Event()
        with pytest.raises(EngineUnavailable, match="not ready to lead"):
            await one.base()

        async def digest() -> str:
            await read.wait()
            return "a" * 64

        one._base = asyncio.create_task(digest())
        monkeypatch.setattr(leaders, "BASE_SECONDS", 0.01)
        with pytest.raises(EngineUnavailable, match="still reads the files of its base model"):
            await one.base()
        read.set()
        assert (await one.base()).sha256 == "a" * 64  # it was not read anew

    asyncio.run(work())


@pytest.mark.parametrize(
    ("url", "key", "warned"),
    [
        ("node1:8000", KEY, True),
        ("http://192.0.2.1:8000", KEY, True),
        ("https://node1:8000", KEY, False),
        ("node1:8000", "", False),
        ("localhost:8000", KEY, False),
        ("127.0.0.2:8000", KEY, False),
        ("http://[::1]:8000", KEY, False),
    ],
)
def test_a_key_that_others_can_read_is_warned_about(
    capsys: pytest.CaptureFixture[str], url: str, key: str, warned: bool
) -> None:
    keys.warn_if_readable(key, url)
    said = capsys.readouterr().err
    assert bool(said) == warned
    if warned:
        (line,) = said.splitlines()
        assert "others on the network can read the API key: start the server there with --ssl-certfile" in line
        assert f"https://{url.removeprefix('http://')} here" in line


def test_each_command_that_sends_a_key_warns(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://nobody.invalid:8000"
    with pytest.raises(SystemExit):
        join(build(None, {"connect_to": url, "wait_for_leader": 1.0}), KEY)
    assert "others on the network can read the API key" in capsys.readouterr().err
    for command in ("adapters ls", "learn watch", "bench serve"):
        done = tandem(*command.split(), "--url", url, env={"TANDEM_API_KEY": KEY})
        assert "others on the network can read the API key" in done.stderr, command


def looked_for(hub: Hub, home: Path, repository: str, sha256: str) -> tuple[list[Path], str]:
    """The folders in which the leader's base may lie beside the built-in model, and what is said about others."""
    program = (
        "import sys; from mlx_tandem.cli.joining import _candidates; from mlx_tandem.training.cluster.wire import Base;"
        "print(*_candidates(Base(sys.argv[2], 'm', sys.argv[1], (), 'policy'), None), sep='\\n')"
    )
    command = [sys.executable, "-c", program, repository, sha256]
    env = hub.environment(home, PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.split() if Path(line) != demo.MODEL_PATH], done.stderr


def test_the_base_is_fetched_from_the_hub(here: Path) -> None:
    wanted = bases.digest(demo.MODEL_PATH)
    with fake_hub({"org/m": demo.MODEL_PATH}) as hub:
        (found,), _ = looked_for(hub, here, "org/m", wanted)
        assert bases.digest(found) == wanted
        hub.asked.clear()
        assert looked_for(hub, here, "org/m", "a" * 64)[0] == []  # the leader has other files under this name now
        assert hub.files_asked() == set()


@pytest.mark.parametrize(
    ("repository", "sha256", "said"),
    [
        ("org/m", "a" * 64, "the files of org/m on the hub are not the leader's"),
        ("org/other", "a" * 64, "has no org/other that can be read"),
        ("org/m@main", "", "the hub id 'org/m@main', which is not like organisation/name"),
        ("org/m@../../../x", "", "which is not like organisation/name"),
        ("../m", "", "which is not like organisation/name"),
        ("org/m/tree", "", "which is not like organisation/name"),
    ],
)
def test_nothing_of_other_contents_is_fetched_from_the_hub(here: Path, repository: str, sha256: str, said: str) -> None:
    with fake_hub({"org/m": demo.MODEL_PATH}) as hub:
        found, errors = looked_for(hub, here, repository, sha256 or bases.digest(demo.MODEL_PATH))
        assert (found, [name for name in hub.files_asked() if name.endswith(".safetensors")]) == ([], [])
        assert sha256 or hub.asked == []
    assert said in errors
