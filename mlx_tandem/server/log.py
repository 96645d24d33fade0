"""One event is one JSON line on standard error. What a caller wrote is not logged, except names that were checked."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback

_logger = logging.getLogger("mlx_tandem")


def log(event: str, level: int = logging.INFO, **fields: object) -> None:
    _logger.log(level, event, extra={"fields": fields})


def log_exception(event: str, error: BaseException, **fields: object) -> None:
    """With the places in the code that the error passed, without its text: that may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{f.filename}:{f.lineno} {f.name}" for f in frames[-12:]]
    log(event, logging.ERROR, error=type(error).__name__, trace=places, **fields)


class JsonLines(logging.Formatter):
    """Escapes everything that is not printable ASCII, so that no value can start a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = type(record.exc_info[1]).__name__
        return json.dumps(line, ensure_ascii=True, default=str)


def configure(level: int = logging.INFO) -> None:
    """Send this project's and the web server's events to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("mlx_tandem", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level if name == "mlx_tandem" else logging.WARNING)
