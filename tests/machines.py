"""Several servers that work together, each in a folder of its own, and a network between them that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlx_tandem import demo
from mlx_tandem.server.sockets import unused_port
from tests.commands import running

KEY = "the-key-of-all-machines"
SMALL = ("--max-model-len", "240", "--num-blocks", "512")


class Network:
    """A way to the port of a server on which bytes can be lost or changed."""

    def __init__(self, target: int):
        self._target = target
        self.port = unused_port()
        self.mode: Literal["whole", "cut", "changed"] = "whole"
        self.carried: list[bytes] = []
        """The first lines of the requests that got through."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open: set[asyncio.StreamWriter] = set()
        self._thread.start()
        serving = asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result()

    def cut(self) -> None:
        """Close what is open, and carry nothing any more."""
        self.mode = "cut"
        self._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in self._open])

    def heal(self) -> None:
        self.mode = "whole"

    def change(self) -> None:
        """Change one bit of every file of an adapter from now on."""
        self.mode = "changed"

    def close(self) -> None:
        self.cut()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "cut":
            writer.transport.abort()
            return
        self._open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            self._open.add(back)
            first = await reader.readline()
            self.carried.append(first)
            back.write(first)
            onward = asyncio.create_task(_copy(reader, back))
            reply = await there.read()  # each request has a connection of its own
            if self.mode == "changed" and b"/files/" in first:
                reply = reply[:-1] + bytes([reply[-1] ^ 1])
            if self.mode != "cut":
                writer.write(reply)
                await writer.drain()
            onward.cancel()
            back.close()
            self._open.discard(back)
        self._open.discard(writer)
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()


class Machine:
    """One server, which may be killed and started again."""

    def __init__(
        self, folder: Path, words: Sequence[str], env: Mapping[str, str] | None = None, small: Sequence[str] = SMALL
    ):
        self.folder, self.port = folder, unused_port()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "my-model").symlink_to(demo.MODEL_PATH)
        (folder / "tandem.key").write_text(KEY, encoding="utf-8")
        (folder / "tandem.key").chmod(0o600)
        self._words = [*words, "--port", str(self.port), *small]
        self._env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")} | dict(env or {})
        self._running: running | None = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")

    def start(self) -> Machine:
        self._running = running(self._words, self.port, self.folder, self._env, self.folder / "log")
        self._running.__enter__()
        return self

    def kill(self) -> None:
        """End it as the loss of power would, with all that it has started."""
        assert self._running is not None
        self._running.process.kill()
        self._running.process.wait()

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """The JSON reply of a request. Raises HTTPError on a status over 299."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", content, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("/v1/cluster/status")
        return found

    def adapters(self) -> dict[str, int]:
        """The version that each adapter's name stands for."""
        return {each["name"]: int(each["version"]) for each in self.ask("/v1/adapters")["adapters"] if each["version"]}

    def version(self) -> int:
        """The number of the version that `policy` stands for; 0: there is none."""
        return self.adapters().get("policy", 0)

    def answer(self, model: str = "policy", **fields: Any) -> dict[str, Any]:
        body = {"model": model, "prompt": "What is 12 + 5?", "max_tokens": 12, "temperature": 0, "logprobs": 1}
        found: dict[str, Any] = self.ask("/v1/completions", body | fields)
        return found

    def collect(self, prompt: str, n: int = 4) -> list[str]:
        """Have answers collected that are scored by their first digit; return the ids of the trajectories."""
        scoring = [{"function": "regex", "options": {"pattern": "[13579]"}}]
        fields = {"n": n, "temperature": 1.5, "max_tokens": 8, "collect_trajectory": True, "scoring_function": scoring}
        choices = self.answer(prompt=prompt, **fields)["choices"]
        return [choice["trajectory_id"] for choice in choices]

    def learn(self, right: str) -> int:
        """Have a trainer learn to prefer an answer; return the number of the version that it publishes."""
        pairs = [{"prompt": "What is 12 + 5?", "completion": c, "reward": r} for c, r in ((right, 1.0), ("none", 0.0))]
        job = self.ask("/v1/training/update", {"trajectories": pairs, "wait": True})
        assert job["report"]["outcome"] == "published", job
        return int(job["report"]["version"])


@contextlib.contextmanager
def closing(*things: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for thing in reversed(things):
            thing.close() if isinstance(thing, Network) else thing.stop()
