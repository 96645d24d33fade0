"""Recording error replies: a count by status and code, and a line where the log has one for each request."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from mlx_tandem.errors import TandemError
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.generation.metrics import Metrics
from mlx_tandem.log import log_request
from mlx_tandem.server.request_id import request_id


def note(metrics: Metrics, error: TandemError, scope: MutableMapping[str, Any]) -> None:
    """Count `error` and log it. The log gets at most RateLimit.MOST_A_SECOND such lines per second.

    The line has the request's id, the client's address, the name of its key and the route's pattern. It leaves out the
    message and the path, which may quote the client. `scope` is that of the request; it may lack every key for data
    that is not HTTP.
    """
    metrics.count_error(error)
    client, route = scope.get("client"), scope.get("route")
    log_request(
        "request refused",
        status=error.status,
        code=error.code,
        request=request_id(scope),
        method=scope.get("method"),
        route=getattr(route, "path", None),
        client=client[0] if client else None,
        key=CALLER.get().name or None,
    )
