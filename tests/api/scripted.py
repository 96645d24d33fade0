"""An engine that says exactly what a test tells it to, at the other end of a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import httpx

from mlx_tandem import demo
from mlx_tandem.config import Config, EngineConfig, ModelConfig, ServerConfig
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.engine.client.process import EngineProcess
from mlx_tandem.engine.messages import CallDone, Inbound, Outbound, Ready, Report
from mlx_tandem.engine.wire import EngineChannel, WireError
from mlx_tandem.server.serve import Server, bind
from mlx_tandem.types import AdapterInfo, EngineInfo

M = TypeVar("M")
SECONDS = 20.0

INFO = EngineInfo(
    model="demo",
    model_type="qwen3",
    dtype="float32",
    quantization=None,
    parameters=1,
    layers=1,
    vocab_size=1024,
    eos_token_ids=(2,),
    max_model_len=256,
    block_size=16,
    num_blocks=65,
    kv_bytes_per_token=1,
    kv_bits=16,
    max_num_seqs=8,
    max_loras=4,
    max_lora_rank=64,
    device="none",
    attention_backend="none",
    lora_backend="none",
    load_seconds=0.0,
)
ADAPTER = AdapterInfo("d" * 64, 8, 2.0, "peft", ("self_attn.q_proj",), 100, 100)


class Peer:
    """One engine's end. It answers by itself whoever asks for the counters, which are those that it has said."""

    def __init__(self, sock: socket.socket):
        self._channel = EngineChannel(sock)
        self._saying = threading.Lock()
        self._heard: SimpleQueue[Inbound | None] = SimpleQueue()
        self.is_silent = False  # when somebody asks for the counters
        self.killed = threading.Event()
        self.ended = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        try:
            while not self.ended.is_set():
                for message in self._channel.receive(SECONDS):
                    if not isinstance(message, Report):
                        self._heard.put(message)
                    elif not self.is_silent:
                        self.say(CallDone(message.call))
        except WireError:
            self._heard.put(None)

    def say(self, *messages: Outbound) -> None:
        with self._saying:
            self._channel.send(messages)

    def ready(self, info: EngineInfo = INFO) -> Peer:
        self.say(Ready(info))
        return self

    def hear(self, kind: type[M]) -> M:
        """The next message, which must be a `kind`."""
        try:
            message = self._heard.get(timeout=SECONDS)
        except Empty:
            raise AssertionError(f"no {kind.__name__} came") from None
        assert isinstance(message, kind), message
        return message

    def hears_the_end(self) -> bool:
        """Whether the front hangs up without another word."""
        return self._heard.get(timeout=SECONDS) is None

    def die(self) -> None:
        self.ended.set()
        self._channel.wake()
        self._listener.join()
        self._channel.close()

    # -- as the client sees it

    def kill(self) -> None:
        self.killed.set()
        self.ended.set()

    def wait(self, timeout: float) -> int | None:
        return 9 if self.ended.wait(timeout) else None

    def last_words(self) -> str:
        return ""


class ScriptedEngine:
    """Hands out a Peer for every launch."""

    def __init__(self) -> None:
        self._peers: SimpleQueue[Peer] = SimpleQueue()
        self._all: list[Peer] = []
        self.launches = 0

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._all:
            peer.die()

    def launch(self) -> tuple[socket.socket, EngineProcess]:
        self.launches += 1
        ours, theirs = socket.socketpair()
        peer = Peer(theirs)
        self._all.append(peer)
        self._peers.put(peer)
        return ours, peer

    def peer(self) -> Peer:
        """The engine that was launched next; waits for it."""
        return self._peers.get(timeout=SECONDS)


@contextlib.contextmanager
def scripted_server(
    info: EngineInfo = INFO,
    model: Path = demo.MODEL_PATH,
    settings: Mapping[str, Any] | None = None,
    **server: object,
) -> Iterator[tuple[httpx.Client, Peer, ScriptedEngine]]:
    """A real HTTP server on a thread, over a scripted engine that is ready. `settings` are those beside `server`."""
    config = Config(EngineConfig(ModelConfig(str(model))), ServerConfig(**server), **(settings or {}))
    engine = ScriptedEngine()
    front = ServerFront(config, engine.launch)
    sock = bind("127.0.0.1", 0)
    up = threading.Event()
    running = Server(front, sock, lambda front, port: up.set())
    thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]})
    thread.start()
    peer = engine.peer().ready(info)
    try:
        assert up.wait(SECONDS)
        with httpx.Client(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=SECONDS) as client:
            yield client, peer, engine
    finally:
        running.should_exit = True
        thread.join()
        sock.close()
        engine.__exit__()
