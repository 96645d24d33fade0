"""The log cannot be flooded."""

from __future__ import annotations

import json
import logging

from mlx_tandem.server.log_lines import JsonLines, RateLimit


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
