"""The log's lines: JSON for programs and short ones for people; and it cannot be flooded."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator

import pytest

from mlx_tandem.log import REQUESTS, log, log_exception, log_request
from mlx_tandem.server.log_lines import FIRST, JsonLines, LogFormat, RateLimit, configure


def record(event: str, created: float) -> logging.LogRecord:
    made = logging.LogRecord("mlx_tandem", logging.INFO, "", 0, event, (), None)
    made.created = created
    made.fields = {"n": 1}
    return made


def test_one_event_is_limited_and_what_was_dropped_is_told() -> None:
    limit = RateLimit()
    most = limit.MOST_A_SECOND
    assert sum(limit.filter(record("flood", 5.5)) for _ in range(most + 30)) == most
    assert limit.filter(record("another", 5.5))
    late = record("flood", 6.1)
    assert limit.filter(late)
    assert json.loads(JsonLines().format(late))["dropped"] == 30
    quiet = record("flood", 9.0)
    assert limit.filter(quiet)
    assert "dropped" not in json.loads(JsonLines().format(quiet))


class Errors(io.StringIO):
    """Standard error, as a terminal or not."""

    def __init__(self, terminal: bool):
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def loggers() -> Iterator[None]:
    """What `configure` changes is as it was afterwards."""
    before = [
        (logging.getLogger(n), *vars(logging.getLogger(n)).copy().items()) for n in ("mlx_tandem", "uvicorn", REQUESTS)
    ]
    yield
    for logger, *attributes in before:
        for name, value in attributes:
            setattr(logger, name, value)
        logger.handlers[:] = []


ENDED = {
    "request": "req-1",
    "id": "req-1",
    "model": "sql@1",
    "outcome": "ok",
    "prompt_tokens": 31,
    "tokens": 9,
    "seconds": 0.25,
    "first_token_ms": 45.2,
    "tokens_per_second": 87.3,
    "finish": ["stop"],
}


def written(
    monkeypatch: pytest.MonkeyPatch,
    *,
    terminal: bool,
    log_format: LogFormat = "auto",
    level: int = logging.INFO,
    colours: bool = False,
    columns: int = 120,
) -> list[str]:
    """What some events are written as."""
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    errors = Errors(terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr("os.get_terminal_size", lambda fd: os.terminal_size((columns, 24)))
    monkeypatch.setenv("TERM", "xterm")
    configure(level, log_format=log_format)
    log("adapter loaded", adapter="sql@1", digest="c1" * 32, rank=16, bytes=1_646_592)
    log_request("request ended", **ENDED)
    log_request("request refused", status=404, code="model_not_found", method="POST", route="/v1/completions")
    log("update refused", logging.WARNING, step=7, version=0, outcome="refused", reason="its weights\nare not finite")
    log("update published", step=8, tokens=6, **{f"number_{i}": i / 3 for i in range(20)}, mean_reward=0.5, dropped={})
    try:
        raise ValueError("a prompt")
    except ValueError as e:
        log_exception("request failed", e, request="req-2")
    return errors.getvalue().splitlines()


@pytest.mark.usefixtures("loggers")
def test_a_terminal_gets_one_short_line_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = written(monkeypatch, terminal=True)
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    told = [line[9:] for line in lines]
    assert told[0] == "adapter loaded: sql@1, rank 16, 1.6 MB"
    assert told[1] == "sql@1 ok: 31 tokens in, 9 out, first after 45 ms, 87 tok/s"
    assert told[2] == "refused 404 model_not_found: POST /v1/completions"
    assert told[3] == r"warning: update refused: step 7, version 0, reason its weights\nare not finite"
    assert told[4].startswith("update published: step 8, mean reward 0.5, tokens 6, number 0 0, number 1 0.333")
    assert len(lines[4]) < 120
    assert told[5:] == ["error: request failed: req-2, error ValueError"]


@pytest.mark.usefixtures("loggers")
def test_a_narrow_terminal_gets_the_beginning_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = written(monkeypatch, terminal=True, columns=40)
    assert lines[1][9:] == "sql@1 ok: 31 tokens in, 9 out"


@pytest.mark.usefixtures("loggers")
def test_colours_are_for_terminals_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = written(monkeypatch, terminal=True, colours=True)
    assert lines[1].startswith("\x1b[2m") and lines[1].endswith(
        "m sql@1 ok: 31 tokens in, 9 out, first after 45 ms, 87 tok/s"
    )
    assert "\x1b[33mwarning: update refused" in lines[3] and "\x1b[31merror: request failed" in lines[5]
    plain = [re.sub(r"\x1b\[\d+m", "", line)[9:] for line in lines]
    assert plain == [line[9:] for line in written(monkeypatch, terminal=True)]
    assert "\x1b" not in "".join(written(monkeypatch, terminal=False, log_format="text", colours=True))


@pytest.mark.usefixtures("loggers")
def test_more_details_have_requests_and_the_places_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = written(monkeypatch, terminal=True, level=logging.DEBUG)
    assert lines[1][9:].startswith("request ended: req-1, model sql@1, ")
    assert re.fullmatch(r"    \S+test_log\.py:\d+ written", lines[-1])


@pytest.mark.usefixtures("loggers")
@pytest.mark.parametrize(
    ("terminal", "log_format", "is_json"),
    [(False, "auto", True), (True, "json", True), (False, "text", False), (True, "text", False)],
)
def test_programs_get_json_and_either_can_be_asked_for(
    terminal: bool, log_format: LogFormat, is_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = written(monkeypatch, terminal=terminal, log_format=log_format)
    assert all(line.startswith("{") is is_json for line in lines)
    if is_json:
        assert json.loads(lines[0])["digest"] == "c1" * 32, "all fields"
        assert "sql@1 ok" not in "".join(lines) and "req-1" not in "".join(lines), "a line for each request is for -v"


def test_fields_that_a_short_line_always_has_say_which_and_why() -> None:
    assert {"request", "adapter", "version", "reason", "error"} <= {*FIRST}
