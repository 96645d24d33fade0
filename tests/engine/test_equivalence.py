"""Adapters and sampling through the real runner: what a request says does not depend on what runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.adapters import formats
from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.plan import CARRY, DeviceError, Row, RowKind, Seating, StepPlan
from mlx_tandem.model.build import build
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.step import compiled
from mlx_tandem.model.step.parts import Flight, loading, saving
from mlx_tandem.types import AdapterRef, Request, SamplingParams
from tests import tiny_models
from tests.engine.harness import Choice, Loop
from tests.engine.mlx_engine import TOLERANCE, Engine, Oracle, assert_agrees, make_engine

_rng = np.random.default_rng(11)
PROMPTS = [tuple(_rng.integers(3, tiny_models.VOCAB, n).tolist()) for n in (5, 33, 1, 17, 9)]
ADAPTERS: dict[str, tuple[Any, int, Callable[[str], bool]]] = {
    # kind, rank, which modules
    "a": ("mlx-lm", 4, lambda path: True),
    "b": ("peft", 16, lambda path: "self_attn" in path),
    "c": ("mlx-lm", 8, lambda path: path.endswith(("q_proj", "v_proj", "down_proj")) and "layers.1" in path),
    "d": ("peft", 1, lambda path: "mlp" in path and "switch" not in path),
}


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Compiled steps are the families' and the demo model's business; here many shapes are met once."""
    mx.disable_compile()
    yield
    mx.enable_compile()


# --- adapters ----------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """An engine whose adapters are registered, and for each of them the model with it merged in."""

    engine: Engine
    oracles: dict[str | None, Oracle]
    names: list[str]


def serve_adapters(folder: Path, *, bits: int | None, family: str, **options: int) -> Served:
    model = tiny_models.make(folder / "model", family, bits=bits, seed=3)
    engine = make_engine(model, **options)
    linears, layers = engine.built.linears, engine.built.layers
    oracles: dict[str | None, Oracle] = {None: Oracle.load(model)}
    for seed, (name, (kind, rank, keep)) in enumerate(ADAPTERS.items()):
        if not any(keep(path) for path in linears):
            continue
        deltas = tiny_models.make_adapter(folder / name, linears, kind, rank=rank, seed=seed, keep=keep)
        weights = formats.read(folder / name, linears, max_rank=16, base_layers=layers)
        engine.weights[weights.info.digest] = weights
        oracles[weights.info.digest] = oracle = Oracle.load(model)
        tiny_models.merge(oracle.model, deltas)
    return Served(engine, oracles, [d for d in oracles if d is not None])


def ask(number: int, adapter: str | None, *, n: int = 1, max_tokens: int = 8, prompt: int | None = None) -> Request:
    which = PROMPTS[number % len(PROMPTS) if prompt is None else prompt]
    scores = (3, None)[number % 2]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=5, prompt_logprobs=scores)
    return Request(number, which, params, AdapterRef(adapter, 1, adapter) if adapter else None, n)


@pytest.mark.promise("DET-6")
@pytest.mark.parametrize(("family", "bits"), [("llama", None), ("llama", 4), ("qwen3_moe", None), ("gemma2", None)])
def test_adapters_in_one_batch_say_what_each_says_merged(
    family: str,
    bits: int | None,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four adapters of different rank, modules and format, and the base, in one batch, in every way a batch goes."""
    served = serve_adapters(tmp_path, max_loras=4, bits=bits, family=family)
    engine, oracles, (a, b, *rest) = served.engine, served.oracles, served.names
    mixed = [ask(i, d) for i, d in enumerate([a, None, b, *rest])]
    alone = [engine.run([r]) for r in mixed]
    ties: list[str] = []
    for loop in alone:
        ties += assert_agrees(loop, oracles, "alone")
    same_prompt = [ask(i, d, prompt=1) for i, d in enumerate([None, *served.names])]
    batch = engine.run(same_prompt)
    assert len({tuple(t) for t in batch.tokens.values()}) == len(same_prompt), "each adapter has its own answer"
    ties += assert_agrees(batch, oracles, "one prompt, every adapter")
    ties += assert_agrees(engine.run(mixed), oracles, "mixed")
    ties += assert_agrees(engine.run(mixed, chunks=5, stagger=1, depth=0), oracles, "mixed and chunked")
    for untraced in (compiled.USUAL, 0):  # 0: traced when first met
        monkeypatch.setattr(engine.built.runner.compiled, "untraced", untraced)
        beside = engine.run(mixed, stagger=1, piggybacked=7)
        assert beside.piggybacked
        ties += assert_agrees(beside, oracles, "mixed, prompts beside those that decode")
    ties += assert_agrees(engine.run([ask(0, a, n=3), ask(1, b, n=2)]), oracles, "mixed and forked")
    crowded = engine.run(
        [ask(i, d, max_tokens=24, prompt=p) for i, (d, p) in enumerate([(a, 0), (b, 2), (None, 3)])], blocks=7
    )
    assert crowded.scheduler.queue.preemptions > 0
    ties += assert_agrees(crowded, oracles, "mixed and preempted")
    again = engine.loop()
    for turn in range(2):  # each adapter finds its own keys and values of one prompt, and no other's
        for i, d in enumerate([None, *served.names]):
            again.add(ask(20 * turn + 2 * i + 1, d, prompt=1))
        again.run()
    assert set(again.cached.values()) == {0, len(PROMPTS[1]) - 1}
    ties += assert_agrees(again, oracles, "mixed, a prefix that was there")
    record_property("near_ties", ties)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_adapters_take_turns_in_too_few_slots(family: str, tmp_path: Path) -> None:
    """A slot holds one adapter after another, of other rank and modules, and nothing is left of the one before."""
    served = serve_adapters(tmp_path, max_loras=1, bits=None, family=family)
    order = [*served.names, None, *reversed(served.names)]
    loop = served.engine.run([ask(i, d, prompt=i % 2) for i, d in enumerate(order)])
    assert_agrees(loop, served.oracles, "in turns")


def test_a_rank_that_grows_beside_a_running_request_does_not_disturb_it(tmp_path: Path) -> None:
    """The stacked arrays are made anew for a larger rank while another adapter's request is in its decode."""
    served = serve_adapters(tmp_path, max_loras=3, bits=None, family="llama")
    a, b, *_ = served.names  # rank 4, then 16
    loop = served.engine.run([ask(0, a, max_tokens=20), ask(1, b), ask(2, None)], stagger=4)
    assert_agrees(loop, served.oracles, "a rank grows")


@pytest.mark.parametrize("packed", [False, True], ids=["numbers-apart", "numbers-together"])
def test_many_rows_of_many_adapters(packed: bool, tmp_path: Path) -> None:
    """More rows than the tests above have: the delta of wide batches is computed in another way."""
    served = serve_adapters(tmp_path, max_loras=4, bits=None, family="llama", num_blocks=200, max_num_seqs=32)
    served.engine.built.runner.inputs.packed = packed
    order = [served.names[i % 5] if i % 5 < len(served.names) else None for i in range(32)]
    loop = served.engine.run([ask(i, d) for i, d in enumerate(order)], chunks=64)
    assert_agrees(loop, served.oracles, "32 rows")


# --- sampling ----------------------------------------------------------------------------------------------------

SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.5, "min_p": 0.01},
    "nucleus": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"top_k": 12, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": tuple(range(3, 60))},
    "greedy, min_tokens": {
        "temperature": 0.0,
        "min_tokens": 5,
        "stop_token_ids": tuple(range(3, 64)),
        "ignore_eos": True,
    },
    "bias": {"logit_bias": ((7, 6.0), (9, -100.0)), "top_k": 40},
    "a window of repetition": {"repetition_penalty": 1.8, "repetition_context": 5},
    "greedy, a longer window": {"temperature": 0.0, "repetition_penalty": 1.6, "repetition_context": 20},
    "allowed": {"allowed_token_ids": tuple(range(3, 90, 7)), "top_p": 0.9},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.01, "xtc_kept": (5, 6)},
    "xtc of a nucleus": {"xtc_probability": 0.7, "xtc_threshold": 0.01, "top_p": 0.7, "temperature": 0.8},
    "likeliest": {"top_p": 0.0},
    "greedy": {"temperature": 0.0},
    "greedy, penalised": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
}


def draw_requests() -> list[Request]:
    return [
        Request(i, PROMPTS[i % len(PROMPTS)], SamplingParams(max_tokens=12, seed=i, logprobs=0, **p), n=1 + i % 2)
        for i, p in enumerate(SAMPLERS.values())
    ]


def choices(*loops: Loop) -> dict[Choice, list[int]]:
    return {key: tokens for loop in loops for key, tokens in loop.tokens.items()}


@pytest.fixture(scope="module")
def sampling_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(tiny_models.make(tmp_path_factory.mktemp("sampling") / "model", "qwen3", seed=1))


def test_seeded_draws_do_not_depend_on_what_runs_beside_them(
    sampling_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, batched, chunked, preempted, forked, at depth 0 and 1; every mechanism in one batch with every other."""
    engine, requests = sampling_engine, draw_requests()
    alone = choices(*(engine.run([r]) for r in requests))
    assert len({tuple(t) for t in alone.values()}) > len(requests), "draws differ"
    assert choices(engine.run(requests)) == alone
    assert choices(engine.run(requests[::-1], depth=0)) == alone
    assert choices(engine.run(requests, chunks=5, stagger=1)) == alone
    for untraced in (compiled.USUAL, 0):
        monkeypatch.setattr(engine.built.runner.compiled, "untraced", untraced)
        beside = engine.run(requests, stagger=1, piggybacked=6)
        assert beside.piggybacked
        assert choices(beside) == alone
    short = [r for r in requests if len(r.prompt) < 10]
    crowded = engine.run(short, blocks=7)
    assert crowded.scheduler.queue.preemptions > 0
    assert choices(crowded) == {key: alone[key] for key in crowded.tokens}


@pytest.mark.promise("D7")
def test_draws_repeat_with_their_seed_and_change_with_it(sampling_engine: Engine) -> None:
    def run(seed: int) -> list[list[int]]:
        r = Request(0, PROMPTS[0], SamplingParams(max_tokens=12, seed=seed), n=3)
        return list(choices(sampling_engine.run([r])).values())

    assert run(5) == run(5)
    assert len({tuple(t) for seed in (5, 6) for t in run(seed)}) == 6


def test_logprobs_of_draws_are_the_model_s(sampling_engine: Engine, tmp_path: Path) -> None:
    """The model's own logprob of what was drawn, whatever truncation and penalties drew it."""
    oracle = Oracle.load(tiny_models.make(tmp_path / "model", "qwen3", seed=1))
    loop = sampling_engine.run(draw_requests())
    for (number, choice), tokens in loop.tokens.items():
        request = loop.requests[number]
        logprobs = oracle.logprobs(request.prompt, tokens)
        for token, said, lp in zip(tokens, loop.logprobs[number, choice], logprobs, strict=True):
            assert said.model == pytest.approx(lp[token], abs=TOLERANCE)
            assert said.sampled <= 0.0


def test_each_gets_the_logprobs_it_asked_for(sampling_engine: Engine) -> None:
    def asking(number: int, k: int | None) -> Request:
        return Request(number, PROMPTS[number % 5], SamplingParams(max_tokens=4, temperature=0.0, logprobs=k))

    loop = sampling_engine.run([asking(i, k) for i, k in enumerate([None, 0, 3, 7, 20, 0])])
    lengths = {number: {len(said.top) for said in loop.logprobs[number, 0]} for number in range(6)}
    assert lengths == {0: set(), 1: {0}, 2: {3}, 3: {7}, 4: {20}, 5: {0}}
    assert all(len(loop.logprobs[number, 0]) == 4 for number in range(1, 6))


def test_a_seat_s_next_owner_does_not_change_what_the_last_one_asked_for(sampling_engine: Engine) -> None:
    """A seat changes hands while a step of its former owner is still on the device."""
    vocabulary = sampling_engine.built.info.vocab_size

    def asking(number: int, k: int, ends_at_once: bool) -> Request:
        stops = tuple(range(vocabulary)) if ends_at_once else ()
        params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=k, prompt_logprobs=k, stop_token_ids=stops)
        return Request(number, PROMPTS[number % 5], params)

    requests = [asking(i, 0 if i < 6 else 5, i % 2 == 1) for i in range(24)]
    loop = sampling_engine.run(requests)
    assert {n: {len(said.top) for said in loop.logprobs[n, 0]} for n in range(24)} == {
        r.id: {r.params.logprobs} for r in requests
    }


@pytest.mark.parametrize("window", [0, 1, 6, 20])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_penalty_remembers_what_was_said_before_a_preemption(
    sampling_engine: Engine, window: int, compiled: bool
) -> None:
    if compiled:
        mx.enable_compile()
    penalised = SamplingParams(
        max_tokens=24,
        temperature=0.0,
        frequency_penalty=0.0 if window else 1.5,
        repetition_penalty=1.2,
        repetition_context=window,
    )
    requests = [Request(i, (20 + i, 9), penalised) for i in range(3)]
    alone = choices(*(sampling_engine.run([r]) for r in requests))
    crowded = sampling_engine.run(requests, blocks=7)
    assert crowded.scheduler.queue.preemptions > 0
    assert choices(crowded) == alone


def test_penalties_and_bias_reach_the_draw(sampling_engine: Engine) -> None:
    """A banned token is never said, a forced one always is, and a strong penalty leaves no repetition."""
    prompt = PROMPTS[0]

    def run(**params: Any) -> list[int]:
        r = Request(0, prompt, SamplingParams(max_tokens=20, temperature=0.0, **params))
        return sampling_engine.run([r]).tokens[0, 0]

    free = run()
    assert free[0] not in run(logit_bias=((free[0], -100.0),))
    assert set(run(logit_bias=((42, 100.0),))) == {42}
    allowed = (42, 50, 60)
    assert set(run(allowed_token_ids=allowed)) <= set(allowed)
    assert run(top_p=0.0, seed=5) == free
    assert len(set(free)) < len(free)
    unrepeated = run(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=10.0)
    assert len(set(unrepeated)) == len(unrepeated)
    assert not set(unrepeated) & set(prompt)
    recent = run(repetition_penalty=10.0, repetition_context=4)
    assert recent != unrepeated
    history = [*prompt, *recent]
    assert all(t not in history[at - 4 : at] for at, t in enumerate(history) if at >= len(prompt))
    assert run(repetition_penalty=1.3, repetition_context=len(history)) == run(repetition_penalty=1.3)


def test_nothing_that_stops_is_drawn_before_min_tokens(sampling_engine: Engine) -> None:
    """Not even what a bias would force, and before and after a preemption alike."""
    banned = tuple(range(3, 40))

    def asking(number: int, least: int) -> Request:
        params = SamplingParams(
            max_tokens=24, min_tokens=least, stop_token_ids=banned, seed=number, logit_bias=((7, 50.0),)
        )
        return Request(number, (20 + number, 9), params)

    requests = [asking(i, 20 + 2 * i) for i in range(3)]
    alone = choices(*(sampling_engine.run([r]) for r in requests))
    for (number, _), tokens in alone.items():
        assert tokens[20 + 2 * number :] in ([7], []), "the bias forces it then"
        assert not set(banned) & set(tokens[: 20 + 2 * number])
    crowded = sampling_engine.run(requests, blocks=7)
    assert crowded.scheduler.queue.preemptions > 0
    assert choices(crowded) == alone
    unmasked = sampling_engine.run([asking(0, 0), asking(1, 10)])
    assert unmasked.tokens[0, 0] == [7]
    assert len(unmasked.tokens[1, 0]) == 11


def test_usual_steps_with_prompts_beside_are_traced(sampling_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream, and beside each of its tokens as many of a prompt; their number is padded, so they are of one kind."""
    device, size = sampling_engine.built.runner, sampling_engine.built.info.block_size
    monkeypatch.setattr(device.compiled, "untraced", compiled.USUAL)  # as on a GPU
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    device.wait(
        device.launch(
            StepPlan(
                (Row(RowKind.PROMPT, 0, 0, 0, 0, (5, 6), [[1, 2]], True),),
                seatings=(Seating(0, greedy, 0, 1, (0,)), Seating(1, greedy, 0, 1, (0,))),
            )
        )
    )
    traced = device.compiled_steps
    for met in range(compiled.USUAL + 2):
        stream = Row(RowKind.DECODE, 0, 0, 0, 2 + met, (7,), [[1, 2]], True)
        table = list(range(3, 3 + -(-10 // size)))
        prompt = Row(RowKind.PROMPT, 1, 1, 0, 0, (9,) * (9 + met % 2), [table], False, piggybacked=True)
        flight = device.launch(StepPlan((stream, prompt)))
        device.wait(flight)
        assert flight.first_use == (met <= compiled.USUAL) and device.compiled_steps == traced + (met >= compiled.USUAL)


def test_prompts_are_scored_in_chunks_beside_others(sampling_engine: Engine, tmp_path: Path) -> None:
    """Each gets as many as it asked for, in chunks of 16 positions a step and together with ordinary prompts."""
    oracle = Oracle.load(tiny_models.make(tmp_path / "model", "qwen3", seed=1))
    requests = [
        Request(
            i,
            PROMPTS[i % 5] + PROMPTS[1],
            SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, prompt_logprobs=k),
            n=n,
        )
        for i, (k, n) in enumerate([(0, 1), (3, 2), (None, 1), (20, 1)])
    ]
    loop = sampling_engine.loop()
    loop.scheduler._scored_positions = 16
    for r in requests:
        loop.add(r)
    loop.run()
    assert_agrees(loop, oracle, "scored in chunks")


# --- failures ----------------------------------------------------------------------------------------------------

BROKEN = 250
"""A token whose embedding is not finite."""


@pytest.fixture(params=[16, 8])
def broken(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Engine, Oracle]:
    folder = tiny_models.make(tmp_path / "model", "llama", tie_word_embeddings=False)
    engine = make_engine(folder, kv_bits=request.param)
    embedding: Any = engine.built.runner.module.model.embed_tokens
    weight = np.array(embedding.weight)
    weight[BROKEN] = np.nan
    embedding.weight = mx.array(weight)
    return engine, Oracle.load(folder, kv_bits=request.param % 16)


def test_a_row_that_is_not_finite_harms_nobody(broken: tuple[Engine, Oracle]) -> None:
    """Neither those beside it nor those who get its blocks: a weight of 0 times NaN is NaN."""
    engine, oracle = broken
    loop = engine.loop(blocks=13)
    greedy = SamplingParams(max_tokens=10, temperature=0.0, logprobs=5)
    loop.add(Request(0, PROMPTS[1], greedy))  # long: the others' tables are padded to its own
    loop.add(Request(1, PROMPTS[0], greedy))
    for _ in range(3):
        loop.step()
    for i, prompt in enumerate([(5, BROKEN, 9), (BROKEN,), (7, 8, BROKEN), (BROKEN, 6) + (7,) * 9], 10):
        loop.add(Request(i, prompt, greedy))
        for _ in range(3):
            loop.step()
    loop.run()
    for i, prompt in enumerate(PROMPTS, 20):
        loop.add(Request(i, prompt, greedy))
    loop.run()
    loop.assert_idle()
    assert loop.failed == {10, 11, 12, 13}
    for key in [key for key in loop.tokens if key[0] in loop.failed]:
        assert loop.tokens.pop(key) == []
    assert_agrees(loop, oracle, "beside rows that are not finite")


def test_an_adapter_that_overflows_harms_nobody_beside_it(tmp_path: Path) -> None:
    """Its rows fail. So would the rows of padding that are run under it, and what those write is read by all."""
    folder = tiny_models.make(tmp_path / "model", "llama")
    engine, oracle = make_engine(folder, max_num_seqs=8), {None: Oracle.load(folder)}
    tiny_models.make_adapter(tmp_path / "adapter", engine.built.linears, "peft", rank=4, seed=1)
    weights = formats.read(tmp_path / "adapter", engine.built.linears, max_rank=16, base_layers=engine.built.layers)
    large = {path: (a * np.float32(1e15), b * np.float32(1e15)) for path, (a, b) in weights.tensors.items()}
    digest = weights.info.digest
    engine.weights[digest] = replace(weights, tensors=large)
    greedy = SamplingParams(max_tokens=10, temperature=0.0, logprobs=5)
    loop = engine.loop()
    for i, prompt in enumerate(PROMPTS[:4]):
        loop.add(Request(i, prompt, greedy))
    for _ in range(6):
        loop.step()
    loop.add(
        Request(10, (5,), greedy, AdapterRef("large", 1, digest))
    )  # the fifth that decodes: five are padded to six
    loop.run()
    loop.assert_idle()
    assert loop.failed == {10}
    assert loop.tokens.pop((10, 0)) == []
    del loop.requests[10]
    assert_agrees(loop, oracle, "beside an adapter that overflows")


def test_the_runner_goes_on_after_a_failed_step(sampling_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was in flight fails; whoever was queued, and whoever comes later, draws what it would have drawn."""
    engine, requests = sampling_engine, draw_requests()
    alone = choices(*(engine.run([r]) for r in requests))
    loop = engine.loop()
    for r in requests:
        loop.add(r)
    for _ in range(5):
        loop.step()
    runner = engine.built.runner
    wait = runner.wait

    def fail(handle: Any) -> Any:
        monkeypatch.setattr(runner, "wait", wait)
        raise DeviceError("injected")

    monkeypatch.setattr(runner, "wait", fail)
    loop.run()
    loop.assert_idle()
    assert loop.failures == 1
    assert 0 < len(loop.failed) < len(requests)
    assert all(tokens == alone[key][: len(tokens)] for key, tokens in loop.tokens.items())
    assert all(loop.tokens[key] == alone[key] for key in loop.finished)
    assert choices(engine.run(requests)) == alone


# --- the pool ----------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


@pytest.fixture(params=[16, 8])
def large_pool(tmp_path: Path, request: pytest.FixtureRequest) -> MLXRunner:
    """128 MiB in four arrays, or in four of 32 and four of 8: a copy of any of them shows."""
    mx.enable_compile()
    config = EngineConfig(
        model=ModelConfig(path=str(tiny_models.make(tmp_path / "model", "llama"))),
        cache=CacheConfig(block_size=16, num_blocks={16: 16384, 8: 65536}[request.param], kv_bits=request.param),
        scheduler=SchedulerConfig(max_num_seqs=4),
        lora=LoraConfig(max_loras=1, max_lora_rank=8),
    )
    return build(config, {}, lambda stage, fraction: None).runner


def _decode(runner: MLXRunner, steps: int, start: int) -> None:
    """One step ahead of the other, two rows, as serving does."""
    flights: list[Any] = []
    for i in range(start, start + steps):
        rows = tuple(
            Row(RowKind.DECODE, seat, seat, 0, 40 + i, (CARRY,), [list(range(1 + 8 * seat, 9 + 8 * seat))], True)
            for seat in (0, 1)
        )
        flights.append(runner.launch(StepPlan(rows)))
        if len(flights) > 1:
            runner.wait(flights.pop(0))
    runner.wait(flights.pop())


def _prefill(runner: MLXRunner) -> None:
    for seat in (0, 1):
        table = list(range(1 + 8 * seat, 9 + 8 * seat))
        row = Row(RowKind.PROMPT, seat, seat, 0, 0, tuple(range(40)), [table], True)
        runner.wait(runner.launch(StepPlan((row,), seatings=(Seating(seat, GREEDY, 0, 40, tuple(range(40))),))))


def test_steps_write_the_pool_in_place(large_pool: MLXRunner) -> None:
    """Prompts, decodes one ahead of the other, copies of blocks, blocks that leave and come back: memory never grows by
    an array of the pool."""
    runner = large_pool
    smallest = min(array.nbytes for arrays in runner._pool.layers for array in arrays)
    assert smallest >= 8 << 20
    _prefill(runner)
    _decode(runner, 4, 0)  # what is traced and made once is there now

    def growth(work: Callable[[], None]) -> int:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        work()
        return int(mx.get_peak_memory()) - int(before)

    def fork() -> None:
        row = Row(RowKind.DECODE, 0, 0, 0, 40, (CARRY,), [list(range(1, 9))], True)
        runner.wait(runner.launch(StepPlan((row,), copies=((3, 20), (4, 21)))))

    def swap() -> None:
        """Between two steps that are in flight; what was saved is what is loaded."""
        row = Row(RowKind.DECODE, 0, 0, 0, 40, (CARRY,), [list(range(1, 9))], True)
        before = runner.launch(StepPlan((row,)))
        saved_parts = saving(runner._pool, [2, 30])
        runner.queue.add(*saved_parts)
        runner.wait(before)
        runner.wait(Flight(StepPlan(()), saved_parts, False))
        saved = runner._pool.bytes_of(saved_parts[0].marker, saved_parts[0].saves)
        assert any(saved[0])
        loaded_parts = loading(runner._pool, [(30, saved[0]), (2, saved[1])])
        runner.queue.add(*loaded_parts)
        after = runner.launch(StepPlan((row,)))
        runner.wait(Flight(StepPlan(()), loaded_parts, False))
        runner.wait(after)
        again = saving(runner._pool, [30, 2])
        mx.eval(again[0].marker)
        assert runner._pool.bytes_of(again[0].marker, again[0].saves) == saved

    assert growth(lambda: _decode(runner, 6, 4)) < smallest // 2
    assert growth(lambda: _prefill(runner)) < smallest // 2
    assert growth(fork) < smallest // 2
    assert growth(swap) < smallest // 2
