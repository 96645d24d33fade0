"""Writing the log, with one JSON line on standard error for each event."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time

from mlx_tandem.printable import MOST_SHOWN

MOST_LOGGED = MOST_SHOWN
"""Most characters of one text in a line."""


class JsonLines(logging.Formatter):
    """A formatter that writes each record as one line of JSON.

    It escapes everything but printable ASCII, so that no value can begin a new line, and shortens long texts.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record, without a line break at its end."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _cut(record.getMessage()),
        }
        line.update({name: _cut(value) for name, value in getattr(record, "fields", {}).items()})
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = type(record.exc_info[1]).__name__
        return json.dumps(line, ensure_ascii=True)


def _cut(value: object) -> object:
    """Return `value` as plain data in which no text has more than MOST_LOGGED characters."""
    match value:
        case None | bool() | int() | float():
            return value
        case list() | tuple():
            return [_cut(item) for item in value]
        case dict():
            return {str(_cut(name)): _cut(item) for name, item in value.items()}
        case _:
            text = str(value)
            return text if len(text) <= MOST_LOGGED else text[: MOST_LOGGED - 1] + "…"


class RateLimit(logging.Filter):
    """A filter that passes at most `MOST_A_SECOND` lines of each event per second.

    Without it, bad requests could fill the disk. The first line of a later second reports in its field `dropped` how
    many lines were dropped before it.
    """

    MOST_A_SECOND = 20

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, object], tuple[int, int]] = {}  # (second, lines in it) by (logger, event)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written. Any thread may call this."""
        event, second = (record.name, record.msg), int(record.created)
        with self._lock:
            since, count = self._seen.get(event, (second, 0))
            dropped = 0
            if second != since:
                dropped, count = max(count - self.MOST_A_SECOND, 0), 0
                since = second
            self._seen[event] = (since, count + 1)
        if dropped:
            record.fields = getattr(record, "fields", {}) | {"dropped": dropped}
        return count < self.MOST_A_SECOND


def configure(level: int = logging.INFO, handler: logging.Handler | None = None) -> None:
    """Send the events of this project and of uvicorn to `handler`, by default as JSON lines to standard error."""
    if handler is None:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
        handler.addFilter(RateLimit())
    for name in ("mlx_tandem", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level if name == "mlx_tandem" else logging.ERROR)  # Its warnings repeat our refusals.
