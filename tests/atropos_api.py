"""Atropos' trajectory API as far as a trainer and an environment use it, over HTTP.

Forms and order of the replies are those of `run-api` of atroposlib 0.4.0: the first trainer decides the batch size, a
batch is whole groups that sum exactly to it, and each request for one forms all that there are.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Group = dict[str, Any]
REGISTRATION = {
    "wandb_group": str, "wandb_project": str, "batch_size": int, "max_token_len": int, "checkpoint_dir": str,
    "save_checkpoint_interval": int, "starting_step": int, "num_steps": int,
}  # fmt: skip
"""All fields of a registration, which are required."""


class Api:
    """The state of the API. `restart` forgets everything, as a new process would."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []  # paths, in order
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        self.registration: dict[str, Any] | None = None
        self.queue: list[Group] = []
        self.batches: list[list[Group]] = []

    def put(self, *groups: Group) -> None:
        """What an environment sends to /scored_data_list."""
        with self._lock:
            self.queue += groups

    def reply(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        with self._lock:
            self.asked.append(path)
            return getattr(self, f"_{method}_{path.strip('/')}", lambda body: (404, {"detail": "Not Found"}))(body)

    def _post_register(self, body: Any) -> tuple[int, Any]:
        if not isinstance(body, dict) or any(not isinstance(body.get(k), t) for k, t in REGISTRATION.items()):
            return 422, {"detail": "a field is missing"}
        self.registration = self.registration or body
        return 200, {"uuid": 1 << 127 | 5}  # larger than 64 bits, as those of Atropos are

    def _get_info(self, body: Any) -> tuple[int, Any]:
        known = self.registration or {"batch_size": -1, "max_token_len": -1}
        return 200, {name: known[name] for name in ("batch_size", "max_token_len")}

    def _get_batch(self, body: Any) -> tuple[int, Any]:
        if self.registration is None:
            message = "Trainer not registered. Call /register first."
            return 200, {"status": "error", "message": message, "batch": []}
        while (batch := self._formed(self.registration["batch_size"])) is not None:
            self.batches.append(batch)
        return 200, {"batch": self.batches.pop(0) if self.batches else None}

    def _formed(self, size: int) -> list[Group] | None:
        count = 0
        for i, group in enumerate(self.queue):
            count += len(group["tokens"])
            if count == size:
                batch, self.queue = self.queue[: i + 1], self.queue[i + 1 :]
                return batch
        return None


@contextlib.contextmanager
def atropos_api() -> Iterator[Api]:
    """The API on a port of its own."""
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            status, found = api.reply(self.command.lower(), self.path, body)
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _handle

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        api.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


def scored(prompt: list[int], answers: list[list[int]], scores: list[float], logprob: float = -0.5) -> Group:
    """A group in the form in which environments send it: with all fields."""
    return {
        "tokens": [prompt + answer for answer in answers],
        "masks": [[-100] * len(prompt) + answer for answer in answers],
        "scores": scores,
        "advantages": None,
        "ref_logprobs": None,
        "messages": None,
        "generation_params": None,
        "inference_logprobs": [[1.0] * len(prompt) + [logprob] * len(answer) for answer in answers],
        "overrides": None,
        "group_overrides": None,
        "images": None,
        "env_id": 0,
        "distill_token_ids": None,
        "distill_logprobs": None,
    }
