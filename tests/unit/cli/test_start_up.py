"""What a server shows while it starts, where standard error is no terminal."""

from __future__ import annotations

import json

import pytest

from mlx_tandem.cli.start_up import StageEvents, StartUp
from mlx_tandem.engine.client.start_times import StartProgress
from mlx_tandem.server.log_lines import JsonLines

STEPS = (
    StartProgress("starting", 0.0, 0.0, None),
    StartProgress("starting", 0.0, 0.3, None),
    StartProgress("reading weights", 0.0, 1.0, 81.4),
    StartProgress("reading weights", 0.5, 31.0, 51.0),
    StartProgress("checking attention", 0.0, 60.0, 600.0),
    StartProgress("warming up", 0.0, 661.0, 0.4),
)


def test_each_stage_is_a_line_with_the_time_that_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    shown = StartUp(verbose=False)
    for step in STEPS:
        shown.update(step)
    shown.close()
    assert capsys.readouterr().err.splitlines() == [
        "tandem: starting …",
        "tandem: reading weights … (about 81 s left)",
        "tandem: checking attention … (about 10 min left)",
        "tandem: warming up … (nearly done)",
    ]


def test_each_stage_is_an_event_of_a_log_in_json(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    shown = StageEvents()
    for step in STEPS:
        shown.update(step)
    events = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert {event["event"] for event in events} == {"starting"}
    assert [(event["stage"], event["elapsed_s"], event["left_s"]) for event in events] == [
        ("starting", 0.0, None),
        ("reading weights", 1.0, 81.4),
        ("checking attention", 60.0, 600.0),
        ("warming up", 661.0, 0.4),
    ]
