"""Writing the log on standard error, with one line for each event: JSON for programs, or a short text for people."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

from mlx_tandem.log import REQUESTS
from mlx_tandem.printable import MOST_SHOWN, printable

MOST_LOGGED = MOST_SHOWN
"""Most characters of one text in a line."""

LogFormat = Literal["auto", "json", "text"]
"""Form of the log's lines; "auto" is text on a terminal and JSON elsewhere."""

FIRST = (
    "request", "job", "adapter", "model", "checkpoint", "step", "version", "status", "code", "folder", "path", "reason",
    "error",
)  # fmt: skip
"""Fields that a short line always shows if the event has them, in this order: the request, adapter or version, and the
reason."""

THEN = ("mean_reward", "loss")
"""Fields that come next, if there is room for them."""

NEVER = ("trace", "digest")
"""Fields that a short line leaves out."""

DIM, RED, YELLOW, PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
"""What a terminal is sent for these colours, and for the end of one."""

COLUMNS = 120
"""Columns of a short line where there is no terminal."""


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


class ShortLines(logging.Formatter):
    """A formatter that writes each record as one short line for people.

    The line has the local time of day, the event, the fields in FIRST, and as many of the other fields as fit into the
    terminal's width. A name or value that is already in the line is not repeated. The end of a request has a line of
    its own kind (`_ended`). With `details` the traceback of an exception follows on lines of its own; with `colours`
    the line has the colours of a terminal.
    """

    def __init__(self, details: bool = False, colours: bool = False):
        super().__init__()
        self._details = details
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record, without a line break at its end."""
        fields = getattr(record, "fields", {})
        if record.name == REQUESTS and not self._details:
            moment = time.strftime("%H:%M:%S", time.localtime(record.created))
            said = _ended(fields, _columns() - len(moment) - 1) if "outcome" in fields else _refused(fields)
            line = f"{moment} {printable(said)}"
        else:
            line = self._any(record)
        return _coloured(line, record) if self._colours else line

    def _any(self, record: logging.LogRecord) -> str:
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        event = record.getMessage()
        fields = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            fields.setdefault("error", type(record.exc_info[1]).__name__)
        told = {name: text for name, value in fields.items() if name not in NEVER and (text := _told(name, value))}
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {kind}{event}"
        mark, columns, words = ": ", _columns(), event.split()
        said = {*words}
        for name in (*FIRST, *THEN, *told):
            text = told.pop(name, "")
            if not text or (text in said and isinstance(fields[name], str)):
                continue
            label = "" if name in (*words, "bytes") else f"{name.replace('_', ' ')} "
            part = f"{mark}{label}{text}"
            if name in FIRST or len(line) + len(part) < columns:
                line, mark = line + part, ", "
                said.add(text)
        places = fields.get("trace", ()) if self._details else ()
        return "\n    ".join([printable(line), *(printable(str(place)) for place in places)])


def _ended(fields: Mapping[str, Any], columns: int) -> str:
    """Return what is said of a request that has ended: the model or adapter that answered it, how it ended, its tokens,
    and how fast they came. What does not fit into so many columns is left out at the end.
    """
    line = f"{fields['model']} {fields['outcome']}"
    parts = [f": {fields['prompt_tokens']} tokens in, {fields['tokens']} out"]
    if fields["first_token_ms"] is not None:
        parts.append(f", first after {fields['first_token_ms']:.0f} ms")
    if fields["tokens_per_second"] is not None:
        parts.append(f", {fields['tokens_per_second']:.0f} tok/s")
    if fields.get("dropped"):
        parts.append(f", {fields['dropped']} requests before it have no line")
    for part in parts:
        if len(line) + len(part) > columns:
            break
        line += part
    return line


def _refused(fields: Mapping[str, Any]) -> str:
    """Return what is said of a request that was refused."""
    line = f"refused {fields['status']} {fields['code']}"
    if fields["route"] is not None:
        line += f": {fields['method']} {fields['route']}"
    return line + (f", {fields['dropped']} before it have no line" if fields.get("dropped") else "")


def _coloured(line: str, record: logging.LogRecord) -> str:
    """Return a line with its time dim, and its text in the colour of a warning or an error where it is one."""
    moment, _, text = line.partition(" ")
    outcome = getattr(record, "fields", {}).get("outcome") if record.name == REQUESTS else "ok"
    if record.levelno >= logging.ERROR or outcome == "failed":
        text = f"{RED}{text}{PLAIN}"
    elif record.levelno >= logging.WARNING or outcome != "ok":
        text = f"{YELLOW}{text}{PLAIN}"
    return f"{DIM}{moment}{PLAIN} {text}"


def _told(name: str, value: object) -> str:
    """Return a field's value as a short text; empty for one that says nothing, and for nested data."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int() if name.endswith("bytes"):
            return f"{value / 1e6:.1f} MB"
        case float():
            return f"{value:.3g}"
        case list() | tuple():
            return " ".join(str(item) for item in value if item is not None)
        case None | dict():
            return ""
    return str(value)


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns or COLUMNS
    except OSError:
        return COLUMNS


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


def configure(
    level: int = logging.INFO, handler: logging.Handler | None = None, log_format: LogFormat = "auto"
) -> None:
    """Send the events of this project and of uvicorn to `handler`, by default to standard error in this format.

    Lines for people have one for each request; JSON has these from the level DEBUG on.
    """
    as_text = False
    if handler is None:
        handler = logging.StreamHandler(sys.stderr)
        terminal = sys.stderr.isatty()
        as_text = log_format == "text" or (log_format == "auto" and terminal)
        colours = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        handler.setFormatter(ShortLines(level <= logging.DEBUG, colours) if as_text else JsonLines())
        handler.addFilter(RateLimit())
    logging.getLogger(REQUESTS).setLevel(logging.DEBUG if as_text else level)
    for name in ("mlx_tandem", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level if name == "mlx_tandem" else logging.ERROR)  # Its warnings repeat our refusals.
