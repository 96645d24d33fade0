"""A hub of this machine: folders served over the Hugging Face hub's API, for its real client."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What it has, and what it was asked for."""

    folders: Mapping[str, Path]
    """The folders of models by `org/name`, and of data sets by `datasets/org/name`."""
    gated: frozenset[str] = frozenset({"org/gated"})
    broken: dict[str, int] = field(default_factory=dict)
    """Files of which the next answer breaks off after so many bytes."""
    held: dict[str, int] = field(default_factory=dict)
    """Files of which nothing comes after so many bytes until the client has gone."""
    refused: frozenset[str] = frozenset()
    """Tokens that are not accepted."""
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    """The ranges that were asked for."""
    tokens: set[str | None] = field(default_factory=set)
    url: str = ""

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Of a process that knows this hub only, with its cache under `home`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        return kept | {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | more

    def files_asked(self) -> set[str]:
        return {path.split("/resolve/")[1].partition("/")[2] for path in self.asked if "/resolve/" in path}


@contextlib.contextmanager
def fake_hub(folders: Mapping[str, Path]) -> Iterator[Hub]:
    hub = Hub(folders)

    class Handler(_Handler):
        served = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # looks so often whether it is to end
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path, query = urlsplit(self.path)[2:4]
        self.served.asked.append(path)
        self.served.tokens.add(self.headers.get("Authorization"))
        words = path.strip("/").split("/")
        api = words[0] == "api"
        words = words[1:] if api else words
        kind = words.pop(0) if words[0] in ("models", "datasets") else "models"
        repo, rest = "/".join(words[:2]), words[2:]
        if (self.headers.get("Authorization") or "").removeprefix("Bearer ") in self.served.refused:
            told = "Invalid credentials in Authorization header"
            return self._send(401, {"error": told}, {"X-Error-Message": told}, body)
        folder = self.served.folders.get(f"datasets/{repo}" if kind == "datasets" else repo)
        if repo in self.served.gated:
            return self._send(403, {"error": "ask first"}, {"X-Error-Code": "GatedRepo"}, body)
        if folder is None:
            return self._send(404, {"error": "nothing here"}, {"X-Error-Code": "RepoNotFound"}, body)
        if len(rest) > 1 and rest[1] not in ("main", "v2", COMMIT):
            return self._send(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"}, body)
        files = {str(f.relative_to(folder)): f for f in sorted(folder.rglob("*")) if f.is_file()}
        if not api:
            file = files.get("/".join(rest[2:]))
            if file is None:
                return self._send(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"}, body)
            return self._send_file(file, body)
        if rest[:1] == ["tree"]:
            if len(rest) > 2:
                return self._send(404, {"error": "no folders here"}, {"X-Error-Code": "EntryNotFound"}, body)
            tree = [
                {"type": "file", "path": name, "size": f.stat().st_size, "oid": _digest(f.read_bytes())}
                for name, f in files.items()
            ]
            return self._send(200, tree, {}, body)
        siblings: list[dict[str, Any]] = [{"rfilename": name} for name in files]
        for each in siblings if "blobs=" in query else ():
            content = files[each["rfilename"]].read_bytes()
            each["size"] = len(content)
            if each["rfilename"].endswith(".safetensors"):
                sha256 = hashlib.sha256(content).hexdigest()
                each["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
        self._send(200, {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}, {}, body)

    def _send_file(self, file: Path, body: bool) -> None:
        data, headers, status = file.read_bytes(), {}, 200
        if file.suffix == ".safetensors":
            headers = {"X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Linked-Size": str(len(data))}
        most = len(data)
        if body:
            most = self.served.broken.pop(file.name, self.served.held.get(file.name, most))
        if asked := self.headers.get("Range"):
            self.served.ranges.append(asked)
            first = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            data, status, most = data[first:], 206, max(most - first, 0)
        self._send(status, data, headers, body, most)
        if most < len(data) and body:
            if file.name in self.served.held:
                self.connection.recv(1)
            self.close_connection = True

    def _send(self, status: int, content: object, headers: dict[str, str], body: bool, most: int | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        fixed = {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, "ETag": f'"{_digest(data)}"'}
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:most])


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
