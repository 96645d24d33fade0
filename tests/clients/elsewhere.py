"""A proxy that stands for everything but this machine: it refuses all requests and remembers what they were for.

Programs that are not Python cannot be watched from inside, but they honour the variables that name a proxy.
"""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterator, Mapping

HERE = "127.0.0.1,localhost"


class Elsewhere:
    """What programs in this environment tried to reach."""

    def __init__(self, port: int) -> None:
        self.tried: list[str] = []
        url = f"http://127.0.0.1:{port}"
        self.environment: Mapping[str, str] = {
            **{name: url for plain in ("http_proxy", "https_proxy", "all_proxy") for name in (plain, plain.upper())},
            **dict.fromkeys(("no_proxy", "NO_PROXY"), HERE),
            "NODE_USE_ENV_PROXY": "1",
        }


@contextlib.contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    class Refuse(socketserver.StreamRequestHandler):
        timeout = 20

        def handle(self) -> None:
            found.tried.append(self.rfile.readline(1000).decode("ascii", "replace").strip())
            self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refuse) as server:
        server.daemon_threads = True
        found = Elsewhere(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
