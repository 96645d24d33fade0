"""`--deterministic`: tokens and logprobs have the same bits whatever runs beside a request, and so do a trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs

from mlx_tandem.adapters import formats
from mlx_tandem.config import SpeculationConfig
from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.learning import WHOLE, Batch, Datum, LossConfig, TrainerSpec, Truncation
from mlx_tandem.engine.proposers.speculation import Speculation
from mlx_tandem.errors import ModelError
from mlx_tandem.model import device
from mlx_tandem.model.ops.attention.fused import Fused
from mlx_tandem.model.overlap import check_deterministic
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.types import AdapterRef, EngineInfo, Request, SamplingParams
from tests import tiny_models
from tests.engine.harness import Loop
from tests.engine.learning import finish
from tests.engine.mlx_engine import Engine, make_engine
from tests.engine.test_draft_model import drafts_of, speculation
from tests.kernels import shim

RANKS = (4, 8)
Said = dict[int, tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """Many shapes are met once; `test_compiled_steps_give_the_same_bits` compiles."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def serve(folder: Path, family: str = "qwen3", *, deterministic: bool = True, **more: Any) -> tuple[Engine, list[str]]:
    """An engine and the digests of its adapters."""
    bits = more.pop("bits", None)
    engine = make_engine(
        tiny_models.make(folder / "model", family, bits=bits),
        num_blocks=160,
        max_num_seqs=16,
        deterministic=deterministic,
        **more,
    )
    names = []
    for seed, rank in enumerate(RANKS):
        place = folder / f"adapter{seed}"
        if not place.exists():
            tiny_models.make_adapter(place, engine.built.linears, "mlx-lm", rank=rank, seed=seed)
            if seed == 0:
                add_head(place, engine, rank)
        weights = formats.read(place, engine.built.linears, max_rank=16, base_layers=engine.built.layers)
        engine.weights[weights.info.digest] = weights
        names.append(weights.info.digest)
    return engine, names


def add_head(folder: Path, engine: Engine, rank: int) -> None:
    """Let an adapter change the output head, too."""
    shape = engine.built.linears["lm_head"]
    rng = np.random.default_rng(9)
    file = folder / "adapters.safetensors"
    tensors = dict(mx.load(str(file)))
    tensors["lm_head.lora_a"] = mx.array(rng.standard_normal((shape.inputs, rank)).astype(np.float32) * 0.1)
    tensors["lm_head.lora_b"] = mx.array(rng.standard_normal((rank, shape.outputs)).astype(np.float32) * 0.1)
    mx.save_safetensors(str(file), tensors)


def requests(names: list[str], count: int = 12, seed: int = 0) -> list[Request]:
    """Greedy and sampled requests to the base and to two adapters; a few have a common beginning."""
    rng = np.random.default_rng(seed)
    common = tuple(rng.integers(3, tiny_models.VOCAB, 24).tolist())
    made = []
    for i in range(count):
        prompt = tuple(rng.integers(3, tiny_models.VOCAB, int(rng.integers(1, 60))).tolist())
        prompt = common + prompt if i % 6 in (3, 4) else prompt
        name = (None, *names)[i % 3]
        params = SamplingParams(
            max_tokens=(8, 24)[i % 2],
            temperature=(0.0, 1.0, 0.7)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            seed=i,
            logprobs=(0, 3)[i % 2],
            prompt_logprobs=2 if i % 5 == 0 else None,
            ignore_eos=True,
        )
        made.append(Request(i, prompt, params, AdapterRef(name, 1, name) if name else None))
    return made


def said(loop: Loop, asked: list[Request]) -> Said:
    """Tokens and logprobs of each request. Python's floats are equal only if all bits are, but for the sign of 0."""
    return {r.id: (loop.tokens[r.id, 0], loop.logprobs[r.id, 0], loop.prompt_logprobs.get(r.id)) for r in asked}


def alone(engine: Engine, asked: list[Request]) -> Said:
    return {r.id: said(engine.run([r]), [r])[r.id] for r in asked}


def one_by_one(engine: Engine, asked: list[Request]) -> Loop:
    """Each request when those before it are over, so that beginnings are found in the prefix cache."""
    loop = engine.loop(chunks=13)
    for request in asked:
        loop.add(request)
        loop.run()
    return loop


def with_drafts(engine: Engine, asked: list[Request]) -> Loop:
    """All requests at once, with drafts from n-grams that are verified in rows of several tokens."""
    loop = engine.loop()
    loop.scheduler.drafting.proposer = Speculation(SpeculationConfig("ngram", dynamic=False, ngram_min=1))
    for request in asked:
        loop.add(request)
    loop.run()
    return loop


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, list[Request], Said]:
    """An engine with requests, and what it says to each alone."""
    mx.disable_compile()
    engine, names = serve(tmp_path_factory.mktemp("deterministic"))
    asked = requests(names)
    return engine, asked, alone(engine, asked)


@pytest.mark.promise("DET-1")
@pytest.mark.parametrize(
    "way",
    [{}, {"chunks": 7}, {"stagger": 3}, {"piggybacked": 16}, {"depth": 0}, {"blocks": 16, "chunks": 11}],
    ids=lambda way: "-".join(way) or "together",
)
def test_company_and_chunks_change_no_bit(served: tuple[Engine, list[Request], Said], way: dict[str, int]) -> None:
    engine, asked, expected = served
    loop = engine.run(asked, **way)
    assert said(loop, asked) == expected
    if "blocks" in way:
        assert sum(loop.preempted.values()), "nothing was preempted"


def test_found_beginnings_change_no_bit(served: tuple[Engine, list[Request], Said]) -> None:
    engine, asked, expected = served
    loop = one_by_one(engine, asked)
    assert sum(loop.cached.values()) > 0
    assert said(loop, asked) == expected


def test_drafts_change_no_bit(served: tuple[Engine, list[Request], Said]) -> None:
    engine, asked, expected = served
    loop = with_drafts(engine, asked)
    assert loop.accepted > 0
    assert said(loop, asked) == expected


def test_a_draft_model_changes_no_number_of_threads(
    tmp_path: Path, served: tuple[Engine, list[Request], Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of BLAS threads belongs to the process, in which the draft model has steps of its own."""
    engine, asked, expected = served
    smaller = make_engine(tiny_models.make(tmp_path, "qwen3", seed=1), num_blocks=160, max_num_seqs=16, max_loras=0)
    chosen: list[int] = []
    blas = SimpleNamespace(openblas_get_num_threads=lambda: 0, openblas_set_num_threads=chosen.append)
    monkeypatch.setattr(device, "_blas", blas)
    loop = engine.loop()
    proposer = loop.scheduler.drafting.proposer = speculation(drafts_of(smaller, seats=16))
    some = [r for r in asked if r.adapter is None]
    for request in some:
        loop.add(request)
    loop.run()
    assert proposer.counts.all.drafted > 0
    assert said(loop, some) == {r.id: expected[r.id] for r in some}
    assert not chosen


def test_random_companies_change_no_bit(served: tuple[Engine, list[Request], Said]) -> None:
    engine, asked, expected = served
    rng = np.random.default_rng(5)
    for _ in range(6):
        some = [asked[i] for i in rng.permutation(len(asked))[: int(rng.integers(2, len(asked)))]]
        loop = engine.run(some, chunks=int(rng.integers(3, 40)), stagger=int(rng.integers(0, 3)))
        assert said(loop, some) == {r.id: expected[r.id] for r in some}


def test_the_rank_of_adapters_arrays_never_changes(tmp_path: Path) -> None:
    """A product's order of sums may depend on it."""
    engine, names = serve(tmp_path)
    small = [r for r in requests(names) if r.adapter and r.adapter.name == names[0]]
    engine.run(small[:1])
    arrays = engine.built.runner._lora.arrays()
    assert {a.shape[-1] for a in arrays[::2]} == {b.shape[-2] for b in arrays[1::2]} == {16}


def test_without_the_option_bits_differ(tmp_path: Path) -> None:
    """These tests are not blind: the same requests differ in company by default."""
    engine, names = serve(tmp_path, deterministic=False)
    asked = requests(names)
    assert said(engine.run(asked), asked) != alone(engine, asked)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"bits": 4}),
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen3_moe", {}),
        ("gemma3_text", {}),  # layers that see a window
        ("qwen3", {"kv_bits": 8}),
        ("qwen3", {"kv_bits": 8, "kv_group_size": 16, "backends": [Fused("cuda", shim.maker())]}),
    ],
)
def test_families_and_types_of_numbers(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    engine, names = serve(tmp_path, family, **more)
    check_deterministic(engine.built.runner, engine.built.info)
    asked = requests(names, count=6)
    expected = alone(engine, asked)
    for loop in (engine.run(asked), engine.run(asked, chunks=9, stagger=2)):
        assert said(loop, asked) == expected


def test_a_kernel_that_reads_the_pool(tmp_path: Path) -> None:
    """The kernel of GPUs, here on the CPU: each query is a row of its own, for prompts and in a trainer, too."""
    engine, names = serve(tmp_path, backends=[Fused("cuda", shim.maker())])
    assert all(own.kernel is not None for own in engine.built.deterministic.attention)
    check_deterministic(engine.built.runner, engine.built.info)
    asked = requests(names, count=5)
    expected = alone(engine, asked)
    loop = engine.run(asked, chunks=9, stagger=1)
    assert said(loop, asked) == expected
    assert_a_trainer_agrees(engine, names, loop, asked)


def test_compiled_steps_give_the_same_bits(served: tuple[Engine, list[Request], Said]) -> None:
    engine, asked, expected = served
    some = asked[:3]
    engine.built.runner.compiled.clear()
    mx.enable_compile()
    try:
        loop = engine.run(some)
    finally:
        engine.built.runner.compiled.clear()
    assert said(loop, some) == {r.id: expected[r.id] for r in some}


def trainers_of(engine: Engine) -> MLXTrainers:
    built = engine.built
    return MLXTrainers(
        built.twin,
        built.adapter_dtype,
        vocab_size=built.info.vocab_size,
        micro_batch_tokens=96,
        most_tokens=256,
        exact=built.deterministic,
    )


def drawn(loop: Loop, asked: list[Request]) -> list[Datum]:
    """Return the tokens and logprobs that the requests drew, in the form that a trainer takes."""
    data = []
    for r in asked:
        tokens, p = loop.tokens[r.id, 0], r.params
        ones = (1.0,) * len(tokens)
        sampled = tuple(each.sampled for each in loop.logprobs[r.id, 0])
        cut = Truncation(p.top_p) if p.top_p < 1.0 else WHOLE
        data.append(Datum((*r.prompt, *tokens), len(r.prompt), ones, sampled, p.temperature, truncation=cut))
    return data


@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_a_trainer_computes_the_bits_that_were_served(tmp_path: Path, family: str, forward_only: bool) -> None:
    engine, names = serve(tmp_path, family)
    asked = requests(names, count=9)
    assert_a_trainer_agrees(engine, names, engine.run(asked, chunks=9), asked, forward_only=forward_only)


def assert_a_trainer_agrees(
    engine: Engine, names: list[str], loop: Loop, asked: list[Request], *, forward_only: bool = True
) -> None:
    """Compare the logprobs of what was drawn through the first adapter with those of a trainer of its weights."""
    asked = [r for r in asked if r.adapter and r.adapter.name == names[0]]
    trainers = trainers_of(engine)
    trainers.open(TrainerSpec("policy", RANKS[0], 2.0 * RANKS[0]), "", engine.weights[names[0]])
    batch = Batch("policy", tuple(drawn(loop, asked)), LossConfig("importance_sampling"))
    (result,) = finish(trainers.run([batch], forward_only, 96))
    served = [loop.logprobs[r.id, 0] for r in asked]
    assert _bits(result.model_logprobs) == _bits([[each.model for each in own] for own in served])
    assert _bits(result.logprobs) == _bits([[each.sampled for each in own] for own in served])


def test_gradients_are_those_of_the_usual_arithmetic(tmp_path: Path) -> None:
    gradients = []
    for deterministic in (True, False):
        engine, names = serve(tmp_path, deterministic=deterministic)
        trainers = trainers_of(engine)
        trainers.open(TrainerSpec("policy", RANKS[0], 2.0 * RANKS[0]), "", engine.weights[names[0]])
        tokens = tuple(np.random.default_rng(1).integers(3, tiny_models.VOCAB, 40).tolist())
        data = Datum(tokens, 20, (1.0, -0.5) * 10, (-3.0,) * 20)
        finish(trainers.run([Batch("policy", (data,), LossConfig("importance_sampling"))], False, 96))
        gradients.append(trainers._trainers["policy"].gradients)
    for path, pair in gradients[0].items():
        for one, other in zip(pair, gradients[1][path], strict=True):
            scale = float(mx.abs(other).max())
            assert float(mx.abs(one - other).max()) <= 1e-4 * scale, path


def _bits(values: Any) -> list[bytes]:
    return [np.array(own, np.float32).tobytes() for own in values]


@pytest.mark.parametrize(
    ("family", "what"),
    [
        ("gpt_oss", "attention sinks"),
        ("gemma2", "compute attention by themselves"),
        ("deepseek_v3", "compute attention by themselves"),
        ("qwen3_5", "recurrent layers"),
    ],
)
def test_families_that_cannot_be_held_are_refused_by_name(tmp_path: Path, family: str, what: str) -> None:
    with pytest.raises(ModelError, match=f"--deterministic does not go with a model .*{what}"):
        make_engine(tiny_models.make(tmp_path / "model", family), deterministic=True)


def test_a_model_whose_bits_depend_on_company_is_not_served(
    tmp_path: Path, served: tuple[Engine, list[Request], Said]
) -> None:
    check_deterministic(served[0].built.runner, served[0].built.info)
    engine, _ = serve(tmp_path, deterministic=False)
    with pytest.raises(ModelError, match="--deterministic: on this device, a prompt of this model has other logprobs"):
        check_deterministic(engine.built.runner, engine.built.info)


LITTLE_ROOM = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 2},
    {"max_model_len": 30},
    {"blocks": 6},
    {"blocks": 3},
    {"blocks": 6, "max_num_seqs": 1, "max_model_len": 20},
]


def with_room(info: EngineInfo, max_num_seqs: int = 16, max_model_len: int = 1024, blocks: int = 160) -> EngineInfo:
    pools = tuple(structs.replace(pool, num_blocks=blocks) for pool in info.memory.pools)
    memory = structs.replace(info.memory, pools=pools)
    return structs.replace(info, max_num_seqs=max_num_seqs, max_model_len=max_model_len, memory=memory)


def test_an_engine_with_little_room_is_checked_too(tmp_path: Path, served: tuple[Engine, list[Request], Said]) -> None:
    engine, _ = serve(tmp_path, deterministic=False)
    for room in LITTLE_ROOM:
        check_deterministic(served[0].built.runner, with_room(served[0].built.info, **room))
        with pytest.raises(ModelError, match="a prompt of this model has other logprobs"):
            check_deterministic(engine.built.runner, with_room(engine.built.info, **room))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("dots1", {"n_routed_experts": 64, "num_experts_per_tok": 4}),
        ("glm4_moe", {"n_routed_experts": 64, "num_experts_per_tok": 4}),
        ("exaone_moe", {"num_experts": 64, "num_experts_per_tok": 4}),
        ("seed_oss", {"tie_word_embeddings": True}),
    ],
)
def test_products_outside_of_linears_are_noticed_at_start(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Gates of experts, or the output head, are products that are not cut into tiles. The gates are in the last layer,
    so that other bits show at their own position only.
    """
    folder = tiny_models.make(tmp_path, family, hidden_size=256, **changes)
    engine = make_engine(folder, num_blocks=64, max_num_seqs=1, deterministic=True)
    with pytest.raises(ModelError, match="a prompt of this model has other logprobs"):
        engine.built.warm_up(CostModel())


def test_a_forced_back_end_of_attention_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "model", "qwen3")
    with pytest.raises(ModelError, match="--deterministic does not go with --attention-backend"):
        make_engine(folder, deterministic=True, attention_backend="metal")
