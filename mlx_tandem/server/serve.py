"""Running the server in this process, until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from uvicorn.config import Config as UvicornConfig

from mlx_tandem.config import Config
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.engine.client import start_times
from mlx_tandem.engine.client.process import Launch, process_launch
from mlx_tandem.engine.client.start_times import KeptTimes, StartProgress
from mlx_tandem.errors import ModelError, TandemError
from mlx_tandem.log import log
from mlx_tandem.server import log_lines
from mlx_tandem.server.app import create_app
from mlx_tandem.server.checks import check
from mlx_tandem.server.connection import connection_class
from mlx_tandem.server.sockets import allow_many_connections, bind

EX_SOFTWARE = 70
"""The exit status for an engine that could not be kept alive."""


def run(
    config: Config,
    *,
    sock: socket.socket | None = None,
    launch: Launch | None = None,
    on_progress: Callable[[StartProgress], None] | None = None,
    on_ready: Callable[[ServerFront, int], None] | None = None,
    log_level: int = logging.INFO,
    start_up: logging.Handler | None = None,
) -> int:
    """Serve until SIGTERM, SIGHUP or SIGINT, and return the exit status.

    The port answers from the start, and /health replies with 503 while the model loads. When requests are accepted,
    `on_ready` is called once with the port, or 0 for a unix socket. Until then the events go to `start_up` instead of
    the log, and then it is closed. Raises ModelError for a model or an adapter folder that cannot be loaded, OSError
    for a port in use, and InvalidRequest for other settings with which the server cannot run.
    """

    def ready(front: ServerFront, port: int) -> None:
        if start_up is not None:
            start_up.close()  # it may have replaced standard error
        log_lines.configure(log_level, log_format=config.server.log_format)
        if on_ready is not None:
            on_ready(front, port)

    check(config.server)
    log_lines.configure(log_level, start_up, config.server.log_format)
    allow_many_connections()
    sock = sock or bind(config.server.host, config.server.port, config.server.uds)
    try:
        times = KeptTimes(start_times.folder(), config)
        front = ServerFront(config, launch or process_launch(config.engine), on_progress=on_progress, times=times)
        server = Server(front, sock, ready)
        server.run(sockets=[sock])
    finally:
        sock.close()
    if isinstance(server.failure, TandemError):
        if isinstance(server.failure, ModelError) or not server.was_ready:
            raise server.failure
        return EX_SOFTWARE
    return 0


class Server(uvicorn.Server):
    """A uvicorn server with a drain of its own, which ends all streams or fails them before it closes connections.

    During the drain, connections are accepted, health probes are answered, and new work is refused with 503. After the
    end, `failure` has the error that ended the server, if one did.
    """

    def __init__(self, front: ServerFront, sock: socket.socket, on_ready: Callable[[ServerFront, int], None]):
        """Configure uvicorn for `sock`, which listens already."""
        server = front.config.server
        super().__init__(
            UvicornConfig(
                create_app(front),
                http=connection_class(server, front.metrics),
                loop="uvloop",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                proxy_headers=False,
                ssl_certfile=server.ssl_certfile or None,
                ssl_keyfile=server.ssl_keyfile or None,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=2,
            )
        )
        self._front = front
        self._port = 0 if server.uds else sock.getsockname()[1]
        self._url = "" if server.uds else _url(sock)
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.failure: TandemError | None = None
        self.was_ready = False

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._front.start()
            announcing = asyncio.create_task(self._announce())
            try:
                await super()._serve(sockets)
            finally:
                announcing.cancel()
        finally:
            await self._front.close()
            await self._front.client.close()

    async def _announce(self) -> None:
        """Call `on_ready` when the engine is ready, and end the server when the engine is given up."""
        try:
            await self._front.client.wait_ready()
            self.was_ready = True
            self._front.fingerprints.start()
            # Objects loaded until now stay for good. A full collection that visits them stops all streams for tens of
            # milliseconds, so the collector no longer tracks them.
            gc.collect()
            gc.freeze()
            self._on_ready(self._front, self._port)
            if self._front.learning is not None:
                for learning in self._front.learning:
                    learning.play(self._url)
            await self._front.client.wait_dead()
        except TandemError as e:
            self.failure = e
            self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGHUP as well, which a terminal sends when it closes, unless it is ignored, as under nohup."""
        with super().capture_signals():
            is_main = threading.current_thread() is threading.main_thread()
            takes = is_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
            before = signal.signal(signal.SIGHUP, self.handle_exit) if takes else None
            try:
                yield
            finally:
                if takes:
                    signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal and stop at once at the second. The signal is not raised again at the end."""
        if self._loop is None:
            self.should_exit = True  # Serving has not begun yet.
        else:
            self._loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        """Handle a signal on the event loop."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self.force_exit = True
            self.should_exit = True

    async def _drain(self) -> None:
        """Refuse new work, wait for open requests for at most `drain_seconds`, and end the server."""
        front = self._front
        log("draining", open_requests=front.request_admission.open_requests)
        front.client.begin_drain()
        front.request_admission.resume()  # what waits is refused now
        try:
            async with asyncio.timeout(front.config.server.drain_seconds):
                await front.request_admission.idle()
                if front.collecting is not None:
                    await front.collecting.settled()
        except TimeoutError:
            front.metrics.shutdown_clean = False
        await front.close()
        await front.client.drain(1.0)
        self.should_exit = True


def _url(sock: socket.socket) -> str:
    """Return an address at which programs on this machine reach the server that listens on `sock`."""
    host, port, *_ = sock.getsockname()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
