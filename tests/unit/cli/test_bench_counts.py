"""What the benchmarks count: events of a stream, medians, ratios, timelines."""

from __future__ import annotations

import json

import pytest

from mlx_tandem.cli.bench.figures import figures, ratios
from mlx_tandem.cli.bench.stats import median, spread
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.cli.bench.timeline import Timeline
from mlx_tandem.http_client import Events


def event(text: str | None = None, **more: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None}]
    return b"data: " + json.dumps({"id": "x", "choices": choices} | more).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


def test_a_stream_is_counted_whatever_the_pieces() -> None:
    text = 'a "data: {" b\n\nc'
    body = b": keepalive 1/2\n\n" + event("") + event(text) + event("b") + event("c") + event("", usage=None)
    body += event(usage=USAGE) + b"data: [DONE]\n\n"
    for size in (1, 7, 64, len(body)):
        stream = Stream()
        for i in range(0, len(body), size):
            stream(body[i : i + size])
        stream.finish(200)
        assert stream.error is None
        if size < 64:
            assert stream.events == 3
        assert (stream.tokens, stream.prompt_tokens) == (3, 7)
        assert len(stream.gaps()) == stream.events - 1


def test_a_stream_of_one_event_per_piece() -> None:
    stream = Stream()
    for piece in (event(""), event("a"), event("b"), event("c", usage=USAGE), b"data: [DONE]\n\n"):
        stream(piece)
    stream.finish(200)
    assert (stream.events, stream.silent, stream.tokens) == (3, 1, 3)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"error": {"message": "no"}}', 500, "500"),
        (event("a") + b'data: {"error": {"message": "engine died"}}\n\n', 200, "engine died"),
        (event("a"), 200, "without [DONE]"),
    ],
)
def test_a_broken_stream_is_an_error(body: bytes, status: int, said: str) -> None:
    stream = Stream()
    stream(body)
    stream.finish(status)
    assert stream.error is not None
    assert said in stream.error
    broken = figures([stream])
    assert (broken["errors"], broken["tokens"]) == (1, 0)


def test_events_are_cut() -> None:
    seen: list[str] = []
    events = Events(seen.append)
    for piece in (b"data: a\n", b"\n: comment\n\nda", b"ta: b\n\n"):
        events(piece)
    assert seen == ["a", "b"]


def test_spread_and_median() -> None:
    assert spread([]) == {"mean": 0.0, "p50": 0.0, "p95": 0.0, "p99": 0.0}
    assert spread(list(range(101))) == {"mean": 50.0, "p50": 50, "p95": 95, "p99": 99}
    assert median([{"a": 1, "b": {"c": 2.0}, "d": None}, {"a": 3, "b": {"c": 4.0}, "d": "x"}]) == {
        "a": 2.0,
        "b": {"c": 3.0},
    }


def test_ratios_compare_rounds_with_their_neighbours() -> None:
    def rounds(*values: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": v} for v in values]

    found = ratios({(4, "base"): rounds(100, 200), (4, "same"): rounds(90, 180), (4, "mixed"): rounds(45, 180)})
    assert found == [{"concurrency": 4, "mixed/same": 0.75, "same/base": 0.9, "mixed/base": 0.675}]


def test_a_timeline_counts_while_all_rows_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("mlx_tandem.cli.bench.timeline.perf_counter", lambda: float(next(clock)))
    # Row 1 starts late: decoding of both is counted from its first token to the end of row 0.
    timeline = Timeline.of(2, [[0], [0, 1], [0, 1], [0, 1], [1]])
    assert timeline.prefill(prompt_tokens=10) == {"prefill_ms": 2000.0, "prefill_tokens_per_s": 5.0}
    assert timeline.decode(max_tokens=4) == {
        "decode_tokens_per_s": 2.0,
        "step_ms": 1000.0,
        "generated_before": 2.0,  # 2 and 1, then 3 and 2
    }
    clock = iter(range(100))
    # A closed loop of two at once: row 2 comes when row 0 has ended.
    timeline = Timeline.of(3, [[0], [0, 1], [1, 2], [2]])
    assert timeline.tokens == 6
    assert timeline.loop(max_tokens=2) == {
        "loop_s": 4.0,
        "loop_tokens_per_s": 1.5,
        "loop_inter_token_p50_ms": 1000.0,
        "loop_inter_token_p99_ms": 1000.0,
    }
    with pytest.raises(RuntimeError, match="other than 3 tokens"):
        Timeline.of(2, [[0], [0, 1], [0, 1]]).loop(3)
    with pytest.raises(RuntimeError, match="3 tokens instead of 4"):
        Timeline.of(1, [[0]] * 3).decode(4)
    with pytest.raises(RuntimeError, match="1 rows got no token"):
        Timeline.of(2, [[0]] * 3).prefill(4)
