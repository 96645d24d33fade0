"""Events for the log: a name and fields. What a caller wrote is not logged, except names that were checked."""

from __future__ import annotations

import logging
import traceback

_logger = logging.getLogger("mlx_tandem")

REQUESTS = "mlx_tandem.requests"
"""Name of the logger of single requests, which `server.log_lines` switches on and off by itself."""

_requests = logging.getLogger(REQUESTS)


def log(event: str, level: int = logging.INFO, **fields: object) -> None:
    """Log `event` with `fields`, which `server.log_lines` writes into one line."""
    _logger.log(level, event, extra={"fields": fields})


def log_request(event: str, **fields: object) -> None:
    """Log the end or the refusal of one request, where the log has a line for each."""
    _requests.debug(event, extra={"fields": fields})


def requests_are_logged() -> bool:
    """Return whether the log has a line for each request, for those whose fields take time."""
    return _requests.isEnabledFor(logging.DEBUG)


def log_exception(event: str, error: BaseException, **fields: object) -> None:
    """Log `event` with the places in the code that `error` passed, without its text, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{f.filename}:{f.lineno} {f.name}" for f in frames[-12:]]
    log(event, logging.ERROR, error=type(error).__name__, trace=places, **fields)
