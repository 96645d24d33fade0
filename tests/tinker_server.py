"""Servers with Tinker's API and a client of it without the SDK, for tests of what they say over HTTP."""

from __future__ import annotations

import asyncio
import gc
import itertools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import zstandard
from msgspec import structs

from mlx_tandem.cli import learning
from mlx_tandem.config import Config, TinkerConfig
from mlx_tandem.dialects.tinker import wire
from tests.serving import RunningServer, demo_config

PROTOBUF = "application/x-protobuf"


def tinker_config(
    folder: Path, *, trainers: int = 4, rank: int = 16, lease_s: float = 60.0, **server: object
) -> Config:
    """The demo server with Tinker's API; checkpoints are in `folder`."""
    tinker = TinkerConfig(enabled=True, trainers=trainers, rank=rank, dir=str(folder / "tinker"), lease_s=lease_s)
    return learning.resolve(structs.replace(demo_config(**server), tinker=tinker), {})


def let_go() -> None:
    """Close what the SDK leaves to the garbage collector, so that later tests do not find it."""
    from tinker.lib.internal_client_holder import sessionless_holder_cache

    for holder in sessionless_holder_cache._holders.values():
        asyncio.run_coroutine_threadsafe(holder.aclose(), holder.get_loop()).result()
    sessionless_holder_cache._holders.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def field(number: int, value: int | bytes) -> bytes:
    return wire._put(number, value)


def tensor(array: Any, kind: int = wire.FLOAT32, shape: Sequence[int] | None = None) -> bytes:
    packed = b"".join(map(wire._write_varint, array.shape if shape is None else shape))
    return field(1, array.tobytes()) + field(3, kind) + field(4, packed)


def datum(tokens: Sequence[int], **inputs: bytes | Sequence[Any]) -> bytes:
    """One example. Its inputs are tensors, or lists of numbers."""
    made = {
        name: own
        if isinstance(own, bytes)
        else tensor(np.array(own, "<i8"), wire.INT64)
        if name == "target_tokens"
        else tensor(np.array(own, "<f4"))
        for name, own in inputs.items()
    }
    chunk = field(1, field(1, np.array(tokens, "<i4").tobytes()))
    return field(1, chunk) + b"".join(wire._put_entry(2, name, own) for name, own in made.items())


def pass_body(
    *data: bytes,
    model: str = "m",
    number: int = 7,
    loss: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    forward_only: bool = False,
) -> bytes:
    head = field(1, model.encode()) + field(2, number) + field(4, loss.encode()) + field(6, int(forward_only))
    settings = b"".join(wire._put_entry(5, name, value) for name, value in (config or {}).items())
    return head + b"".join(field(3, own) for own in data) + settings


SENTENCE = datum([10, 11, 12, 13], target_tokens=[11, 12, 13, 14], weights=[1, 1, 1, 1])


class Client:
    """One session of a client with this key."""

    def __init__(self, server: RunningServer, key: str = "tml-a"):
        self.http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": key}, timeout=60)
        self.session = self.ok("create_session", tags=[], user_metadata={}, sdk_version="0")["session_id"]
        self.numbers = itertools.count(1)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def finish(self) -> None:
        self.ok(f"sessions/{self.session}/finish", reason={"type": "success"})

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(f"/{path}", json=body)

    def ok(self, path: str, /, **body: Any) -> dict[str, Any]:
        reply = self.post(path, **body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def refused(self, path: str, status: int = 400, /, **body: Any) -> str:
        """Post what the server refuses; return why."""
        return said(self.post(path, **body), status)

    def result(self, request: str) -> Any:
        """The result of a request: bytes, or an object."""
        while True:
            reply = self.post("retrieve_future", request_id=request)
            if reply.status_code != 408:
                break
        assert reply.status_code == 200, reply.text
        return reply.content if PROTOBUF in reply.headers["content-type"] else reply.json()

    def done(self, path: str, /, **body: Any) -> Any:
        return self.result(self.ok(path, **body)["request_id"])

    def model(self, number: int = 0, rank: int = 4, **lora: Any) -> str:
        made = self.done("create_model", **self.asked_model(number, rank, **lora))
        found: str = made["model_id"]
        return found

    def asked_model(self, number: int = 0, rank: int = 4, **lora: Any) -> dict[str, Any]:
        config = {"rank": rank, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True} | lora
        own = {"session_id": self.session, "model_seq_id": number, "type": "create_model"}
        return own | {"base_model": "base", "lora_config": config, "optimizer_config": {"type": "adamw"}}

    def run(self, body: bytes, *, packed: bool = True, **headers: str) -> httpx.Response:
        coding = {"content-encoding": "zstd"} if packed else {}
        content = zstandard.ZstdCompressor().compress(body) if packed else body
        own = {"content-type": PROTOBUF, **coding, **headers}
        return self.http.post("/forward_backward", content=content, headers=own)

    def loss(self, model: str, *data: bytes, forward_only: bool = True, **more: Any) -> float:
        """The loss of a pass."""
        number = next(self.numbers)
        reply = self.run(
            pass_body(*(data or (SENTENCE,)), model=model, number=number, forward_only=forward_only, **more)
        )
        assert reply.status_code == 200, reply.text
        return loss_of(self.result(reply.json()["request_id"]))

    def step(self, model: str, rate: float = 1e-2) -> Any:
        return self.done("optim_step", model_id=model, seq_id=next(self.numbers), adam_params={"learning_rate": rate})

    def sampler(self, number: int = 0, **source: Any) -> str:
        own = {"session_id": self.session, "sampling_session_seq_id": number} | (source or {"base_model": "base"})
        found: str = self.ok("create_sampling_session", **own)["sampling_session_id"]
        return found


def said(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, (reply.status_code, reply.text)
    found: str = reply.json()["error"]["message"]
    return found


def loss_of(content: bytes) -> float:
    """The loss in a ForwardBackwardOutput."""
    budget = wire.Budget()
    entries = [
        wire._entry(own, budget, "metrics")
        for number, own in wire._fields(memoryview(content), budget, "")
        if number == 3
    ]
    return {name: wire._double(own, name) for name, own in entries if own is not None}["loss:sum"]


def samples_of(content: bytes) -> list[list[int]]:
    """The tokens of the sequences in a SampleResponse."""
    budget, found = wire.Budget(), []
    for number, own in wire._fields(memoryview(content), budget, ""):
        if number == 1:
            fields = dict(wire._fields(own, budget, ""))  # type: ignore[arg-type]
            found.append(np.frombuffer(fields[2], "<i4").tolist())
    return found
