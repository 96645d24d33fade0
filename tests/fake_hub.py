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
    asked: list[str] = field(default_factory=list)
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
            return self._send(200, file.read_bytes(), {}, body)
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

    def _send(self, status: int, content: object, headers: dict[str, str], body: bool) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        fixed = {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, "ETag": f'"{_digest(data)}"'}
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
