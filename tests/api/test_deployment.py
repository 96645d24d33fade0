"""What a server needs behind proxies, in containers and for browsers: sockets, TLS, prefixes, origins, keys, hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlx_tandem.config import ServerConfig
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server.checks import check
from mlx_tandem.server.sockets import UnixListener, bind
from tests.api.scripted import scripted_server
from tests.serving import RunningServer, demo_config, serving
from tests.unit.cli_tools import tandem as command
from tests.waiting import until

TLS = Path(__file__).parents[1] / "tls"
CHAT = {"messages": [{"role": "user", "content": "What is 12 + 5?"}], "temperature": 0, "max_tokens": 16}
ANSWER = "12 + 5 = 17."
PAGE = "https://page.test"


def refused(**server: object) -> str:
    """What is said of settings that cannot be served with; the setting is named."""
    with pytest.raises(InvalidRequest) as raised:
        check(ServerConfig(**server))
    assert raised.value.param is not None
    return raised.value.message


def tandem(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_tandem", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


# -- unix sockets ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def over(path: Path) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
        yield client


def leave(path: Path, server: RunningServer, client: httpx.Client) -> None:
    """Be noticed to leave a request, which nothing else can end while the engine stands still."""
    body = b'{"prompt": "x", "max_tokens": 900, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: client.get("/health").json()["open_requests"] == 1)
        until(lambda: not client.get("/health").json()["open_requests"])
    finally:
        os.kill(engine, signal.SIGCONT)


def test_a_unix_socket_is_served_on_and_removed(tmp_path):
    path = tmp_path / "tandem.sock"
    umask = os.umask(0)  # what others may do does not depend on it
    try:
        with serving(demo_config(uds=str(path))) as server, over(path) as client:
            assert stat.S_ISSOCK(path.lstat().st_mode)
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            reply = client.post("/v1/chat/completions", json=CHAT)
            assert reply.json()["choices"][0]["message"]["content"] == ANSWER
            lines = client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text.split()
            assert lines[-1] == "[DONE]"
            leave(path, server, client)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0
            assert not path.exists()
    finally:
        os.umask(umask)


def test_a_socket_that_nobody_listens_on_is_replaced(tmp_path):
    path = tmp_path / "tandem.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    before = path.lstat().st_ino
    with contextlib.closing(UnixListener(str(path))) as ours:
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert ours.getsockname() == str(path)
    assert not path.exists() and before


def test_a_socket_that_somebody_listens_on_is_left(tmp_path):
    path = tmp_path / "tandem.sock"
    with contextlib.closing(bind("", 0, str(path))):
        done = tandem("--uds", str(path))
        assert done.returncode == 1
        assert done.stderr == f"tandem: the unix socket {path} cannot be bound: a server listens on it\n"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_listener_removes_no_socket_but_its_own(tmp_path):
    path = tmp_path / "tandem.sock"
    first = UnixListener(str(path))
    path.unlink()
    with contextlib.closing(UnixListener(str(path))):
        first.close()
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize("made", ["file", "folder", "link", "nowhere", "long"])
def test_a_path_that_cannot_be_had(tmp_path, made):
    path = tmp_path / "x"
    if made == "file":
        path.write_text("precious")
    elif made == "folder":
        path.mkdir()
    elif made == "link":
        (tmp_path / "precious").write_text("precious")
        path.symlink_to(tmp_path / "precious")
    elif made == "nowhere":
        path = tmp_path / "nowhere" / "x"
    else:
        path = tmp_path / ("x" * 200)
    done = tandem("--uds", str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"tandem: the unix socket {path} cannot be bound: ")
    assert done.stderr.count("\n") == 1
    if made in ("file", "link"):
        assert path.read_text() == "precious"


def test_a_unix_socket_needs_no_key_and_cannot_go_to_the_background(tmp_path):
    check(ServerConfig(uds="x", host="0.0.0.0"))
    done = tandem("--uds", str(tmp_path / "x"), "--daemon")
    assert done.returncode == 2
    assert "found by its port" in done.stderr
    assert not (tmp_path / "x").exists()


# -- TLS ---------------------------------------------------------------------------------------------------------------


def test_https_with_the_certificate_that_is_given():
    files = {"ssl_certfile": str(TLS / "cert.pem"), "ssl_keyfile": str(TLS / "key.pem")}
    with serving(demo_config(**files)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        context = ssl._create_unverified_context()
        with socket.create_connection((host, int(port)), timeout=20) as sock, context.wrap_socket(sock) as tls:
            shown = ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True) or b"")
            assert tls.version() in ("TLSv1.2", "TLSv1.3")
        assert shown.split() == (TLS / "cert.pem").read_text().split()
        with httpx.Client(base_url=f"https://{host}:{port}", verify=False, timeout=60) as client:
            assert client.get("/health").json()["status"] == "ok"
            reply = client.post("/v1/chat/completions", json=CHAT)
            assert reply.json()["choices"][0]["message"]["content"] == ANSWER
            lines = client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text.split()
            assert lines[-1] == "[DONE]"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health")
        check_commands(f"https://{host}:{port}")


def check_commands(url: str) -> None:
    """The commands that ask a running server reach one whose certificate they are told to trust."""
    cert = str(TLS / "cert.pem")
    asked = ("--num-requests", "1", "--repeats", "1", "--concurrency", "1", "--max-tokens", "2")
    commands = {
        ("adapters", "ls"): "shout",
        ("learn", "watch"): f"{url} does not learn",
        ("checkpoints", "rollback", "--yes"): f"{url} answered with ",
        ("bench", "serve", *asked): "1 at once",
    }
    for words, said in commands.items():
        done = command(*words, "--url", url, "--cacert", cert)
        assert said in done.stdout + done.stderr, done.stderr
        done = command(*words, "--url", url)
        line = f"tandem: the certificate of {url.removeprefix('https://')} is not trusted: self-signed certificate; "
        assert done.returncode == 1 and done.stderr.startswith(line) and "--cacert" in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    assert command("adapters", "ls", "--url", url, env={"SSL_CERT_FILE": cert}).returncode == 0
    assert (
        "one with --ssl-certfile is at https://" in command("adapters", "ls", "--url", url.replace("s:", ":", 1)).stderr
    )
    for file, said in (("nowhere", "nowhere cannot be read"), (str(TLS / "key.pem"), "key.pem holds no certificate")):
        done = command("adapters", "ls", "--url", url, "--cacert", file)
        assert done.returncode == 1 and said in done.stderr and "--cacert" in done.stderr


def test_a_server_without_tls_is_not_at_https(server: RunningServer) -> None:
    done = command("adapters", "ls", "--url", server.url.replace("http:", "https:"))
    assert done.returncode == 1 and "does not speak TLS" in done.stderr and "try http://" in done.stderr


def test_certificates_that_cannot_be_served_with(tmp_path):
    cert, key = str(TLS / "cert.pem"), str(TLS / "key.pem")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    assert "without ssl_certfile" in refused(ssl_keyfile=key)
    assert "cannot be read: No such file" in refused(ssl_certfile="/does/not/exist", ssl_keyfile=key)
    assert "cannot be read: No such file" in refused(ssl_certfile=cert, ssl_keyfile="/does/not/exist")
    assert "cannot be used for TLS" in refused(ssl_certfile=str(nonsense), ssl_keyfile=key)
    assert "cannot be used for TLS" in refused(ssl_certfile=cert)
    both = tmp_path / "both.pem"
    both.write_text((TLS / "cert.pem").read_text() + (TLS / "key.pem").read_text())
    check(ServerConfig(ssl_certfile=str(both)))
    done = tandem("--ssl-certfile", str(nonsense), "--port", "0")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("tandem: ")


def test_a_key_with_a_passphrase_is_refused_without_asking():
    message = refused(ssl_certfile=str(TLS / "cert.pem"), ssl_keyfile=str(TLS / "encrypted-key.pem"))
    assert message == "ssl_keyfile is encrypted: give a key without a passphrase"


# -- behind a proxy ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxied() -> Iterator[RunningServer]:
    """Reached under a prefix, with a key, and open to one page."""
    config = demo_config(root_path="/llm/tandem", api_key="k", allowed_origins=(PAGE, "https://other.test:8443"))
    with serving(config) as server:
        yield server


KEY = {"authorization": "Bearer k"}


@pytest.mark.parametrize("prefix", ["", "/llm/tandem"])
def test_a_prefix_is_taken_away(proxied, prefix):
    client = proxied.client
    for path in ("/health", "/livez", "/readyz"):
        assert client.get(prefix + path).json() == {"status": "ok"}
    assert client.get(f"{prefix}/v1/models").status_code == 401
    assert client.get(f"{prefix}/v1/models", headers=KEY).json()["data"]
    assert client.get(f"{prefix}/v1/models/shout", headers=KEY).json()["id"] == "shout"
    reply = client.post(f"{prefix}/v1/chat/completions", headers=KEY, json=CHAT)
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize(
    "path", ["/llm", "/llm/tandem", "/llm/tandemv1/models", "/LLM/tandem/health", "/llm/tandem" * 2]
)
def test_only_the_prefix_itself_is_taken_away(proxied, path):
    assert proxied.client.get(f"{path}/x", headers=KEY).status_code == 404
    assert proxied.client.get(path).status_code == 401


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a//b", "/a b", "/{a}", "/a?b", "/é", "https://a.test/x"])
def test_what_is_no_prefix(path):
    assert "root_path is" in refused(root_path=path)


# -- browsers ----------------------------------------------------------------------------------------------------------


def preflight(client: httpx.Client, origin: str, method: str = "POST", **headers: str) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": method} | headers
    return client.options("/v1/chat/completions", headers=asked)


@pytest.mark.parametrize("origin", [PAGE, "https://other.test:8443"])
def test_a_page_may_use_the_server(proxied, origin):
    """A browser asks first, without the key, and lets the page read what this allows."""
    wanted = "authorization,content-type,x-stainless-os"
    asked = preflight(proxied.client, origin, **{"access-control-request-headers": wanted})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == origin
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == wanted
    assert "Origin" in asked.headers["vary"]
    network = preflight(proxied.client, origin, **{"access-control-request-private-network": "true"})
    assert network.headers["access-control-allow-private-network"] == "true"
    for headers, status in ((KEY, 200), ({}, 401)):
        reply = proxied.client.post("/v1/chat/completions", headers={"origin": origin, **headers}, json=CHAT)
        assert reply.status_code == status, "a page can read why it was refused"
        assert reply.headers["access-control-allow-origin"] == origin
        exposed = reply.headers["access-control-expose-headers"].lower()
        assert "x-request-id" in exposed and "x-tandem-skipped" in exposed
        assert "access-control-allow-credentials" not in reply.headers
        assert "Origin" in reply.headers["vary"]


@pytest.mark.promise("G4")
@pytest.mark.parametrize(
    "origin",
    ["https://evil.test", "http://page.test", f"{PAGE}:8443", f"{PAGE}.evil.test", f"{PAGE}/", "null", "*", ""],
)
def test_another_page_may_not(proxied, origin):
    asked = preflight(proxied.client, origin)
    assert asked.status_code == 401
    assert "access-control-allow-origin" not in asked.headers
    reply = proxied.client.get("/v1/models", headers={"origin": origin, **KEY})
    assert "access-control-allow-origin" not in reply.headers
    assert "Origin" in reply.headers["vary"]


def test_no_page_may_unless_it_is_said(server):
    asked = preflight(server.client, PAGE)
    assert asked.status_code == 405
    reply = server.client.get("/v1/models", headers={"origin": PAGE})
    assert not [name for name in (*asked.headers, *reply.headers) if name.startswith("access-control")]


def test_any_page_may_where_that_is_said():
    with scripted_server(allowed_origins=("*",)) as (client, _, _):
        assert preflight(client, PAGE).headers["access-control-allow-origin"] == "*"
        assert preflight(client, PAGE, "TRACE").status_code == 405
        reply = client.get("/v1/models", headers={"origin": "null"})
        assert reply.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    "origin", ["page.test", f"{PAGE}/", f"{PAGE}/x", "https://Page.test", "null", "", "https://*.test"]
)
def test_what_is_no_origin(origin):
    assert "an origin is scheme://host" in refused(allowed_origins=(PAGE, origin))


@pytest.mark.promise("G2")
@pytest.mark.parametrize("host", ["", "a b", "https://a.test", "a.test/x", "a.test:0", "a.test:65536", "a.test:"])
def test_a_host_of_images_that_cannot_be_one_is_refused(host: str) -> None:
    assert "a host is a name" in refused(allow_image_hosts=("a.test", host))


# -- names and keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (
            b"Evil.a:81",
            "the Host 'Evil.a:81' is not served here; if it is this server's, start it with --allowed-host evil.a",
        ),
        (b"[::2]", "the Host '[::2]' is not served here; if it is this server's, start it with --allowed-host [::2]"),
        (b"a\tb\xe9", r"the Host 'a\tb\xe9' is not the name of a host"),
        (b"<script>", "the Host '<script>' is not the name of a host"),
        (b"x" * 300, f"the Host '{'x' * 100}' is not the name of a host"),
        (b"a\r\nHost: b", "the request has 2 Host headers; one is needed"),
    ],
)
def test_the_refusal_of_a_host_says_what_to_do(server, host, said):
    address, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address, int(port)), timeout=20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 403")
    assert httpx.Response(403, content=answer.partition(b"\r\n\r\n")[2]).json()["error"]["message"] == said


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "k")], 200),
        ([("X-API-Key", "k"), ("authorization", "Bearer other")], 200),
        ([("x-api-key", "other"), ("authorization", "Bearer k")], 200),
        ([("x-api-key", "k"), ("authorization", "Basic dTpw")], 200),
        ([("x-api-key", "other")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", "Bearer k")], 401),
        ([("x-api-key", "k"), ("x-api-key", "k")], 401),
        ([("x-api-key", "k"), ("x-api-key", "other")], 401),
        ([("x-api-key", "other"), ("authorization", "Bearer other")], 401),
    ],
)
def test_the_key_may_come_as_x_api_key(proxied, headers, status):
    assert proxied.client.get("/v1/models", headers=headers).status_code == status


# -- routes that clients know by other paths --------------------------------------------------------------------------


def test_routes_without_v1(server):
    client = server.client
    chat = client.post("/chat/completions", json=CHAT).json()
    assert chat["choices"][0]["message"]["content"] == ANSWER
    body = {"prompt": "Once there was", "max_tokens": 4, "temperature": 0}
    assert client.post("/completions", json=body).json()["choices"] == server.complete(**body).json()["choices"]
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/models/shout").json() == client.get("/v1/models/shout").json()


def test_the_version(server):
    assert server.client.get("/version").json() == {"version": server.client.get("/health").json()["version"]}
