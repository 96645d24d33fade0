"""What is kept of an error reply: a count by status and code, and under `-v` a line in the log."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from mlx_tandem.errors import TandemError
from mlx_tandem.generation.metrics import Metrics
from mlx_tandem.log import log
from mlx_tandem.server.request_id import request_id


def note(metrics: Metrics, error: TandemError, scope: MutableMapping[str, Any]) -> None:
    """Count `error` and log it, at most RateLimit.MOST_A_SECOND times a second.

    The line names the request by its id, the client by its address and the route by its pattern. It has no part of the
    message or of the path, which may quote what the client wrote. `scope` is {} for what is not HTTP.
    """
    metrics.count_error(error)
    client, route = scope.get("client"), scope.get("route")
    log(
        "request refused",
        logging.DEBUG,
        status=error.status,
        code=error.code,
        request=request_id(scope),
        method=scope.get("method"),
        route=getattr(route, "path", None),
        client=client[0] if client else None,
    )
