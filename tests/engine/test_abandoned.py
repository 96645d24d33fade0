"""Clients that leave while their prompts are being read: what was read is there for whoever asks again."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_tandem.engine.sequence import Run, Sequence
from mlx_tandem.types import Image, Request, SamplingParams
from tests import tiny_models
from tests.engine import agreement, mlx_engine
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


def test_a_prompt_with_images_is_cut_anywhere() -> None:
    """Also within an image: what is left is compared by the prefix cache as it was before."""
    image = Image(start=1, tokens=7, digest=b"0123456789abcdef", arrays=b"")
    for length in range(1, 13):
        request = Request(0, tuple(range(12)), SamplingParams(max_tokens=4))
        s, whole = (Sequence(i, request, 0, frozenset()) for i in range(2))
        s.runs = whole.runs = (Run(image, 1, 0, 3), Run(image, 6, 3, 4))
        s.cut(length)
        assert s.content == whole.content[:length]
        assert s.prompt_length == len(s.tokens) == length


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_next"])
def test_models_go_on_from_what_was_read(tmp_path: Path, family: str) -> None:
    """After a client has left, and after a preemption: they say what mlx-lm says."""
    folder = tiny_models.make(tmp_path / "model", family)
    prompt = (*agreement.PROMPTS[1], *agreement.PROMPTS[3], *agreement.PROMPTS[1])
    mx.disable_compile()
    try:
        loop = mlx_engine.make_engine(folder).loop()
        loop.scheduler.prefill._chunk_tokens = 16
        loop.add(agreement.ask(1, prompt))
        loop.step()
        (s,) = loop.scheduler.queue.running
        size, read = loop.scheduler._blocks.groups[0].pool.block_size, s.scheduled
        loop.cancel(1)
        loop.run()
        del loop.requests[1], loop.tokens[1, 0]
        assert size <= read < len(prompt) - 1
        loop.add(agreement.ask(2, prompt[:-1]))
        loop.step()
        (s,) = loop.scheduler.queue.running
        loop.scheduler.queue.preempt(s)
        loop.run()
        assert loop.cached[2] >= read // size * size
        mlx_engine.assert_agrees(loop, mlx_engine.Oracle.load(folder), "what was read")
    finally:
        mx.enable_compile()
