"""What is left of requests that were refused: a count, and a line of the log under `-v`."""

from __future__ import annotations

import ast
import json
import re
import socket
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_tandem import errors
from mlx_tandem.errors import CODES, InvalidRequest
from mlx_tandem.generation.metrics import Metrics
from tests.serving import ROOT, RunningServer, demo_config, serving

KEY = "sk-canary-8a7b"
CANARY = "canary-3c2d"
GOOD = {"authorization": f"Bearer {KEY}"}
JSON = GOOD | {"content-type": "application/json"}
CHAT = "/v1/chat/completions"

REFUSED = {  # what is sent, and the status and code that it comes to
    "no key": (("GET", "/v1/models", {}, b""), 401, "invalid_api_key"),
    "wrong key": (("POST", CHAT, {"authorization": f"Bearer {CANARY}"}, b"{}"), 401, "invalid_api_key"),
    "host": (("GET", "/v1/models", GOOD | {"host": f"{CANARY}.test"}, b""), 403, "host_not_allowed"),
    "path": (("GET", f"/{CANARY}", GOOD, b""), 404, "not_found"),
    "adapter": (("GET", f"/v1/adapters/{CANARY}", GOOD, b""), 404, "adapter_not_found"),
    "method": (("PUT", CHAT, GOOD, b""), 405, "method_not_allowed"),
    "json": (("POST", CHAT, JSON, b"{" + CANARY.encode()), 400, "invalid_json"),
    "type": (("POST", CHAT, JSON, json.dumps({"messages": CANARY}).encode()), 400, "invalid_type"),
    "field": (("POST", CHAT, JSON, json.dumps({CANARY: 1}).encode()), 400, "unknown_parameter"),
    "model": (
        ("POST", CHAT, JSON, json.dumps({"model": CANARY, "messages": [{"role": "user", "content": "x"}]}).encode()),
        404,
        "model_not_found",
    ),
    "size": (("POST", CHAT, JSON, b" " * 5000), 413, "too_large"),
    "media": (("POST", CHAT, GOOD | {"content-type": CANARY}, b"{}"), 415, "unsupported_media_type"),
}


def replies(server: RunningServer) -> Counter[tuple[str, str]]:
    """The counter of error replies by status and code."""
    families = text_string_to_metric_families(server.client.get("/metrics", headers=GOOD).text)
    samples = [s for f in families for s in f.samples if s.name == "tandem_error_replies_total"]
    return Counter({(s.labels["status"], s.labels["code"]): int(s.value) for s in samples})


def raw(server: RunningServer, sent: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(sent)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    return answer


def test_each_refusal_is_counted_and_leaves_a_line(tmp_path):
    log = tmp_path / "log"
    config = demo_config(api_key=KEY, allowed_hosts=("tandem.test",), max_request_bytes=4096)
    with serving(config, log=log) as server:
        before = replies(server)
        for name, ((method, path, headers, body), status, code) in REFUSED.items():
            headers = headers | {"x-request-id": name.replace(" ", "-")}
            reply = server.client.request(method, path, headers=headers, content=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), name
        assert raw(server, b"garbage\r\n\r\n").startswith(b"HTTP/1.1 400")
        long = raw(server, b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n")
        assert long == b"" or long.startswith(b"HTTP/1.1 431")
        expected = Counter((str(status), code) for _, status, code in REFUSED.values())
        expected += Counter({("400", "invalid_request"): 1, ("431", "too_large"): 1})
        grown = replies(server)
        grown.subtract(before)
        assert +grown == expected
        assert server.chat("hi", max_tokens=1).status_code == 401
        answered = server.client.post(
            CHAT, headers=GOOD | {"x-request-id": "mine"}, json={"messages": [{"role": "user", "content": CANARY}]}
        )
        assert answered.status_code == 200
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    refused = [line for line in lines if line["event"] == "request refused"]
    assert len(refused) == sum(expected.values()) + 1
    for name, (_, status, code) in REFUSED.items():
        (line,) = [r for r in refused if r["request"] == name.replace(" ", "-")]
        assert (line["level"], line["status"], line["code"]) == ("debug", status, code)
        assert line["client"] == "127.0.0.1"
    assert [r["status"] for r in refused if r["method"] is None] == [400, 431]
    assert {r["route"] for r in refused} == {None, CHAT, "/v1/adapters/{name}"}
    (ended,) = [line for line in lines if line["event"] == "request ended"]
    assert (ended["request"], ended["id"]) == ("mine", answered.json()["id"])
    assert ended["tokens"] == answered.json()["usage"]["completion_tokens"]
    assert CANARY not in text and KEY not in text


@pytest.mark.promise("H4")
def test_a_flood_of_bad_requests_does_not_flood_the_log(tmp_path):
    """Every one is counted, and the lines that are there say how many are not."""
    log = tmp_path / "log"
    with serving(demo_config(), log=log) as server:
        for _ in range(300):
            assert server.client.get("/nothing").status_code == 404
        assert replies(server)["404", "not_found"] == 300
    lines = [json.loads(line) for line in log.read_text().splitlines() if '"request refused"' in line]
    seconds = {line["time"][:19] for line in lines}
    assert len(lines) <= 20 * len(seconds)
    assert len(lines) + sum(line.get("dropped", 0) for line in lines) <= 300


@pytest.mark.promise("H3")
def test_labels_come_from_a_fixed_set():
    """Whatever is counted: no error can bring a label of its own."""
    metrics = Metrics()
    for n in range(1000):
        metrics.count_error(InvalidRequest("x", code=f"made_up_{n}"))
    assert metrics.errors == {"other": 1000}
    assert metrics.error_replies == {(400, "other"): 1000}


def literals(source: str) -> set[str]:
    """The codes that a source text gives to errors."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
            found.add(str(node.value.value))
        if isinstance(node, ast.ClassDef) and any("Error" in ast.unparse(base) for base in node.bases):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code":
                    found.add(ast.literal_eval(line.value))
    return found


def test_every_code_is_known():
    used = {code for file in (ROOT / "mlx_tandem").rglob("*.py") for code in literals(file.read_text(encoding="utf-8"))}
    used |= {
        str(kind.code)
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.TandemError) and kind.code
    }
    assert len(used) > 30
    assert used <= CODES
    page = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8").partition("## Errors")[2].partition("\n## ")[0]
    told = {
        code for row in re.findall(r"^\| \d+ \| (.*?) \|", page, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)
    }
    assert len(told) > 20
    assert told <= CODES


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/training/update"])
def test_get_on_a_post_route_says_what_to_do(server, path):
    reply = server.client.get(path)
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert reply.json()["error"]["message"] == f"'{path}' does not take GET: send POST with a JSON body"


@pytest.mark.parametrize(
    ("method", "path", "allow", "how"),
    [
        ("POST", "/health", "GET, HEAD", "GET"),
        ("GET", "/training/checkpoint", "POST", "POST"),
        ("GET", "/model/switch-lora", "POST", "POST with a JSON body"),
        ("PUT", "/v1/adapters", "GET, HEAD, POST", "GET or POST with a JSON body"),
        ("POST", "/v1/aliases/x", "DELETE, GET, HEAD, PUT", "DELETE or GET or PUT with a JSON body"),
    ],
)
def test_a_method_that_is_not_taken(server, method, path, allow, how):
    reply = server.client.request(method, path)
    assert (reply.status_code, reply.headers.get_list("allow")) == (405, [allow])
    assert reply.json()["error"]["message"] == f"'{path}' does not take {method}: send {how}"
