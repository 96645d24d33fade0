"""Which prompts a step reads beside what decodes, on the reference runner."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mlx_tandem.config import SchedulerConfig
from mlx_tandem.engine import prefill
from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.prompt_cost import prompt_seconds
from tests.engine.workloads import make_engine, request


@pytest.mark.parametrize("piggybacked", [0, 256])
def test_a_step_s_time_bounds_a_long_prompt_beside_decodes(piggybacked: int) -> None:
    """While many others decode, a chunk of a long prompt costs no more than their share, and is never empty."""
    engine = make_engine(num_blocks=600, block_size=4, max_num_seqs=20, piggybacked=piggybacked)
    loop, scheduler = engine.loop, engine.scheduler
    scheduler.prefill.cost.fit(
        [(length, 0, float(length)) for length in (8, 64, 256, 1024)], [(1, 100.0)]
    )  # 1 ms a token
    streams = 16
    for i in range(streams):
        loop.add(request(i, (1,), max_tokens=100))
    loop.step()
    loop.step()
    loop.add(request(99, tuple(i % 13 for i in range(1000))))
    budget = SchedulerConfig().prefill_share * scheduler.prefill.cost.decode(streams)
    chunks = []
    while not loop.tokens[99, 0]:
        before = engine.runner.positions
        loop.step()
        chunks.append(engine.runner.positions - before - streams)
    assert sum(chunks) >= 1000
    assert all(8 <= chunk <= budget for chunk in chunks[:-3])


def test_a_chunk_waits_until_it_is_worth_what_any_chunk_takes() -> None:
    """As on a GPU, where any chunk takes as long as reading all weights: few chunks, within the prompts' share."""
    engine = make_engine(num_blocks=600, block_size=4, max_num_seqs=20)
    loop, scheduler = engine.loop, engine.scheduler
    fixed, token, step = 6.0, 0.02, 5.0
    chunks = [(length, 0, fixed + token * length) for length in (8, 64, 256, 1024)]
    scheduler.prefill.cost.fit(chunks, [(1, step), (16, step)])
    for i in range(16):
        loop.add(request(i, (1,), max_tokens=100))
    loop.step()
    loop.step()
    loop.add(request(99, tuple(i % 13 for i in range(1000))))
    read = []
    while not loop.tokens[99, 0]:
        before = engine.runner.positions
        loop.step()
        read.append(engine.runner.positions - before - 16)
    worth = [n for n in read if n > 0]
    assert min(worth[:-2]) * token >= fixed
    spent, share = sum(fixed + token * n for n in worth[:-2]), SchedulerConfig().prefill_share
    assert spent <= (len(read) + 1) * share * step
    assert len(read) < 20  # a hundred and more in chunks of eight tokens


def test_prompts_go_beside_streams_unless_they_are_more() -> None:
    for prompts, piggybacked in ((3, True), (5, False)):
        engine = make_engine(num_blocks=600, block_size=4, max_num_seqs=20, piggybacked=30)
        loop = engine.loop
        for i in range(4):
            loop.add(request(i, (1,), max_tokens=100))
        loop.step()
        loop.step()
        for i in range(4, 4 + prompts):
            loop.add(request(i, tuple((i + j) % 13 for j in range(20))))
        before = engine.runner.positions
        loop.step()
        assert (loop.piggybacked > 0) == piggybacked
        if piggybacked:  # the first whole, as much of the second as there is room for
            assert engine.runner.positions - before == 4 + 30


def test_a_burst_of_prompts_is_not_dripped_in() -> None:
    """When few decode and many wait, the prompts come first: a batch that is not full wastes every step."""
    engine = make_engine(num_blocks=600, block_size=4, max_num_seqs=20)
    loop, scheduler = engine.loop, engine.scheduler
    scheduler.prefill.cost.fit([(length, 0, float(length)) for length in (8, 64, 256, 1024)], [(1, 20.0)])
    loop.add(request(0, (1,), max_tokens=100))
    loop.step()
    for i in range(1, 17):
        loop.add(request(i, tuple(j % 13 for j in range(60)), max_tokens=100))
    steps = 0
    while any(not loop.tokens[i, 0] for i in range(1, 17)):
        loop.step()
        steps += 1
    assert steps <= 32  # an eighth of what eight tokens a step would take


@pytest.mark.parametrize(("choices", "most_steps"), [(1, 32), (8, 8)])
def test_a_prompt_of_many_choices_is_read_as_if_so_many_prompts_waited(choices: int, most_steps: int) -> None:
    """All of its choices wait for the prompt, and the batch is not full without them."""
    engine = make_engine(num_blocks=600, block_size=4, max_num_seqs=64)
    loop, scheduler = engine.loop, engine.scheduler
    scheduler.prefill.cost.fit([(length, 0, float(length)) for length in (8, 64, 256, 1024)], [(1, 20.0)])
    for i in range(8):
        loop.add(request(i, (1,), max_tokens=100))
    loop.step()
    loop.step()
    for i in range(8, 12):
        loop.add(replace(request(i, tuple((i + j) % 13 for j in range(60)), max_tokens=100), n=choices))
    steps = 0
    while any(not loop.tokens[i, 0] for i in range(8, 12)):
        loop.step()
        steps += 1
    assert steps <= most_steps
    assert choices > 1 or steps > 8, "prompts of one choice leave streams their share of the time"


def test_a_prompt_is_read_beside_streams_however_dear_a_chunk_is() -> None:
    """A chunk that is worth its fixed cost may be more than any step has time for."""
    engine = make_engine(num_blocks=600, block_size=4)
    loop, cost = engine.loop, engine.scheduler.prefill.cost
    cost.fit([(length, 0, 150.0 + length) for length in (8, 64, 256, 1024)], [(1, 10.0)])
    assert cost.least() > SchedulerConfig().prefill_share * prefill._HURRY * cost.decode(1)
    loop.add(request(0, (1,), max_tokens=100))
    loop.step()
    loop.add(request(1, tuple(i % 13 for i in range(500))))
    while not loop.tokens[1, 0]:
        assert not loop.finished, "the prompt waits until nobody decodes"
        loop.step()


@pytest.mark.parametrize(("fixed", "least", "most"), [(1.0, 150, 200), (80.0, 1000, 1280), (500.0, 900, 1500)])
def test_an_idle_device_that_is_slow_to_read_the_weights_reads_long_chunks(fixed: float, least: int, most: int) -> None:
    """At 1 ms a token, so that chunks are as long as milliseconds were given to them."""
    engine = make_engine(num_blocks=3000, block_size=4, max_num_seqs=2, max_chunk_tokens=2048)
    loop = engine.loop
    engine.scheduler.prefill.cost.fit([(n, 0, fixed + n) for n in (8, 64, 256, 1024)], [(1, fixed)])
    loop.add(request(0, tuple(i % 13 for i in range(4000))))
    loop.step()
    assert least <= fixed + engine.runner.positions <= 4 / 3 * most


def test_what_reading_a_prompt_takes_is_predicted_chunk_by_chunk() -> None:
    cost = CostModel()
    assert prompt_seconds((), 10_000, 512) == 0.0
    cost.fit([(n, c, 50.0 + n + 0.001 * n * (c + n / 2)) for n in (8, 64, 256) for c in (0, 1024)])
    whole = sum(cost.predict(min(512, 2000 - at), at) for at in range(0, 2000, 512)) / 1e3
    assert prompt_seconds(cost.form, 2000, 512) == pytest.approx(whole)
    assert prompt_seconds(cost.form, 2000, 128) > prompt_seconds(cost.form, 2000, 512), "chunks have a fixed cost"


def test_what_was_saved_up_for_a_prompt_survives_steps_without_it() -> None:
    """Rows made for training are in every other step."""
    engine = make_engine(num_blocks=600, block_size=4, max_num_seqs=20)
    loop = engine.loop
    engine.scheduler.prefill.cost.fit([(length, 0, 20.0 + length) for length in (8, 64, 256, 1024)], [(1, 20.0)])
    for i in range(16):
        loop.add(request(i, (1,), max_tokens=100))
    loop.step()
    loop.add(replace(request(99, tuple(i % 13 for i in range(60))), background=True))
    while not loop.tokens[99, 0]:
        assert not loop.finished, "the prompt waits until nobody decodes"
        loop.step(background=loop.steps % 2 == 0)


def test_short_prompts_do_not_take_a_long_one_s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where so many are read in a step, it is the first of them, whether or not their tokens go beside streams."""
    monkeypatch.setattr(prefill, "_PIGGYBACKED_END", 4)
    engine = make_engine(num_blocks=600, block_size=4, max_num_seqs=20, prefill_batch_size=1, piggybacked=50)
    loop = engine.loop
    for i in range(4):
        loop.add(request(i, (1,), max_tokens=100))
    loop.step()
    loop.add(request(99, tuple(i % 13 for i in range(60))))
    while not loop.tokens[99, 0]:
        assert (0, 0) not in loop.finished, "the long prompt waits until nobody decodes"
        at = loop.steps
        loop.add(request(100 + at, (at % 13, at // 13, 3, 4), max_tokens=1))
        loop.step()
