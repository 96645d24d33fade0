"""Requests that are wrong by the server's own OpenAPI document: another project's tool makes and judges them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from starlette.routing import Route

from mlx_tandem.config import BatchesConfig
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.routes import ROUTES
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server import app as module
from mlx_tandem.server import text_reply
from mlx_tandem.server.app import create_app
from tests.api.scripted import scripted_server
from tests.serving import RunningServer, demo_config, serving

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",  # no status that the document does not have
    "content_type_conformance",
    "response_schema_conformance",  # every error in the one shape
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One of its own: what is sent to it may load and remove adapters, and leave files."""
    batches = BatchesConfig(dir=str(tmp_path_factory.mktemp("batches")))
    with serving(replace(demo_config(), batches=batches)) as running:
        yield running


def routes() -> list[tuple[str, str]]:
    def launch() -> object:
        raise AssertionError("nothing is started here")

    found = create_app(ServerFront(demo_config(), launch)).routes  # type: ignore[arg-type]
    return [(m, r.path) for r in found if isinstance(r, Route) for m in r.methods or () if m != "HEAD"]


def test_every_route_is_described(server: RunningServer) -> None:
    reply = server.client.get("/openapi.json")
    assert reply.headers["content-type"] == "application/json"
    described = reply.json()
    operations = {(m.upper(), path) for path, item in described["paths"].items() for m in item}
    assert operations == {(m, path.replace(":path", "")) for m, path in routes()}
    names = [operation["operationId"] for item in described["paths"].values() for operation in item.values()]
    assert len(names) == len(set(names))


def test_the_document_names_the_bodies_that_routes_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, object] = {}

    async def record(request, kind, limit, incoming, *, others=(), optional=False, prepare=None):  # type: ignore[no-untyped-def]
        read[request.scope["route"].path] = kind
        raise InvalidRequest("recorded")

    for reader in (module, text_reply):
        monkeypatch.setattr(reader, "read_json", record)
    with scripted_server() as (client, _, _):
        for method, path in routes():
            if method in ("POST", "PUT") or path == "/status-env":  # which Atropos asks by GET with a body
                client.request(method, path.replace("{name}", "x"))
    assert read == {route.path: route.body for route in ROUTES if route.body is not None}


def aliases() -> set[str]:
    """Return the paths that are served below /v1, too, with the same bodies."""
    served = {(route.method, route.path, route.body) for route in ROUTES}
    return {route.path for route in ROUTES if (route.method, f"/v1{route.path}", route.body) in served}


@pytest.mark.promise("C10")
@pytest.mark.programs
@pytest.mark.slow
def test_wrong_requests_are_refused_in_the_one_shape(server: RunningServer, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    tool = [str(Path(sys.executable).parent / "st"), "run", f"{server.url}/openapi.json", "--no-color"]
    data = ["--mode", "negative", "--generation-allow-x00", "true", "--generation-database", "none", "--seed", "19"]
    # Those of Tinker are all refused on this server; tests/api/test_tinker.py attacks them on another one.
    # Aliases are served by the code of the paths below /v1, which are attacked.
    paths = (re.escape(path.replace(":path", "")) for path in aliases())
    data += ["--exclude-path-regex", "|".join(("^/api/v1/", *(f"^{path}$" for path in paths)))]
    # Stateful tests would follow links between operations, of which the document has none that they reach.
    effort = ["--phases", "coverage,fuzzing", "--max-examples", "2", "--no-shrink", "--warnings", "off"]
    done = subprocess.run(
        [*tool, *data, *effort, "--suppress-health-check", "all", "--checks", ",".join(CHECKS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,  # a hang
    )
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases is not None and int(cases[1]) > 3000
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
