"""Clients that leave while their prompts are being read: what was read is there for whoever asks again."""

from __future__ import annotations

import pytest

from mlx_tandem.types import Request, SamplingParams
from tests.engine.toy_model import STATE, Windows
from tests.engine.workloads import Engine, assert_exact, make_engine

PROMPT = tuple(i * i % 13 for i in range(60))
SIZE = 4
KINDS: list[Windows] = [(None,), (None, 8), (8,), (None, STATE), (None, 8, STATE), (STATE,)]


def ask(number: int, *, n: int = 1) -> Request:
    return Request(number, PROMPT, SamplingParams(max_tokens=4, seed=number), n=n)


def server(windows: Windows, depth: int, **options: int) -> Engine:
    sizes = {
        "num_blocks": 100,
        "block_size": SIZE,
        "max_chunk_tokens": 8,
        "window_blocks": 60,
        "state_blocks": 60,
    } | options
    return make_engine(windows=windows, depth=depth, **sizes)  # type: ignore[arg-type]


def read_by(engine: Engine, request: int) -> int:
    """The tokens of its prompt that the only sequence of a request has read, or that are being read."""
    (s,) = (s for s in engine.scheduler.queue.running if s.request.id == request)
    return min(s.scheduled, len(PROMPT) - 1)


@pytest.mark.parametrize("windows", KINDS, ids=str)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
def test_what_was_read_is_found_again(windows: Windows, depth: int, n: int) -> None:
    """At every moment of the reading. Nothing is held afterwards, and the answer is what it is alone."""
    for moment in range(1, 9):
        engine = server(windows, depth)
        engine.loop.add(ask(0, n=n))
        for _ in range(moment):
            engine.loop.step()
        read = read_by(engine, 0)
        engine.loop.cancel(0)
        steps = engine.loop.steps
        engine.loop.run()
        engine.loop.assert_idle()
        assert engine.loop.steps <= steps + 2 + depth, "it stays for one more token"
        engine.loop.add(ask(1))
        engine.loop.run()
        assert engine.loop.cached[1] >= read // SIZE * SIZE > 0
        assert_exact(engine.loop, windows=windows)


@pytest.mark.parametrize("windows", KINDS, ids=str)
def test_what_was_read_is_kept_only_if_the_next_token_is_finite(windows: Windows) -> None:
    """Nobody is told of a failure: the client has left."""
    for moment in range(1, 8):
        engine = server(windows, 0)
        engine.runner.nan = {moment: 0}
        engine.loop.add(ask(0))
        for _ in range(moment):
            engine.loop.step()
        engine.loop.cancel(0)
        engine.loop.run()
        engine.loop.assert_idle()
        assert not engine.loop.failed
        assert not any(cache.counts().blocks for cache in engine.scheduler._blocks._caches)


def test_who_left_takes_no_blocks_of_others() -> None:
    """It ends at once when there is no block for its token."""
    engine = server((None, STATE), 0, state_blocks=4, num_blocks=100)
    engine.loop.add(ask(0))
    engine.loop.step()
    pool = engine.scheduler._blocks.groups[-1].pool
    taken = pool.allocate(pool.free_blocks)
    assert taken is not None
    engine.loop.scheduler.cancel(0, keep=True)
    assert engine.scheduler.requests
    assert engine.scheduler.plan() is None
    assert not engine.scheduler.requests
    assert not engine.scheduler.queue.preemptions


@pytest.mark.parametrize("windows", KINDS, ids=str)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_sequence_goes_on_where_it_was(windows: Windows, depth: int) -> None:
    """At every moment of the reading, twice. Nobody else finds what it has read before it has drawn a token."""
    for moment in range(1, 9):
        engine = server(windows, depth)
        engine.loop.add(ask(0))
        for _ in range(2):
            for _ in range(moment):
                engine.loop.step()
            running = engine.scheduler.queue.running
            if not running or running[0].has_drawn or running[0].pending:
                break
            s = running[0]
            whole = min(s.scheduled, len(PROMPT) - 1) // SIZE
            engine.scheduler.queue.preempt(s)
            assert engine.scheduler._blocks.match(s).whole == whole
            engine.loop.add(ask(1))
            other = next(x for x in engine.scheduler._sequences.values() if x is not s)
            assert engine.scheduler._blocks.match(other).whole == 0
            engine.loop.cancel(1)
            del engine.loop.requests[1], engine.loop.tokens[1, 0]
        engine.loop.run()
        engine.loop.assert_idle()
        assert engine.runner.positions <= len(PROMPT) + 4 + 2 * SIZE
        assert_exact(engine.loop, windows=windows)
        engine.loop.add(ask(2))
        engine.loop.run()
        assert engine.loop.cached[2] >= (len(PROMPT) - 1) // SIZE * SIZE, f"at {moment} not everybody finds it now"
        assert not any(cache._aside for cache in engine.scheduler._blocks._caches)


@pytest.mark.parametrize("windows", KINDS, ids=str)
@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_what_was_set_aside_and_never_shown_to_be_finite_is_found_by_nobody(windows: Windows, end: str) -> None:
    for moment in range(1, 9):
        engine = server(windows, 0)
        engine.loop.add(ask(0))
        for _ in range(moment):
            engine.loop.step()
        (s,) = engine.scheduler._sequences.values()
        if s.has_drawn:
            break
        engine.scheduler.queue.preempt(s)
        if end == "fail":
            engine.scheduler.fail([])
            engine.runner.reset()
        engine.loop.cancel(0)
        engine.loop.run()
        engine.loop.assert_idle()
        assert not any(cache.counts().blocks or cache._aside for cache in engine.scheduler._blocks._caches)
        engine.loop.add(ask(1))
        engine.loop.run()
        assert engine.loop.cached[1] == 0
        assert_exact(engine.loop, windows=windows)
