"""Faults at start: a kernel that is not to be had, wrong or slow on this device ends in a server that serves, and that
says what it goes on without."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np
import pytest
from msgspec import structs

from mlx_tandem.adapters import formats
from mlx_tandem.config import CacheConfig, DutyConfig, EngineConfig, LoraConfig, ModelConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.plan import StepPlan, StepResult
from mlx_tandem.engine.wire import EngineChannel, WireError
from mlx_tandem.engine_main import serve
from mlx_tandem.model import build, warm_up
from mlx_tandem.model.choices import Kept
from mlx_tandem.model.kernels import checking, inplace
from mlx_tandem.model.kernels.checking import finish
from mlx_tandem.model.kernels.dialect import Kernel, Make, Source
from mlx_tandem.model.ops import gated_delta
from mlx_tandem.model.ops.attention import choice
from mlx_tandem.model.ops.attention.block import FusedBlock
from mlx_tandem.model.ops.delta_net import FusedDeltaNet
from mlx_tandem.model.ops.lora import choice as lora
from mlx_tandem.model.ops.sampling import choice as sampling
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.step.parts import Flight
from mlx_tandem.types import AdapterRef, AdapterSource, Delta, Request, SamplingParams
from tests import tiny_models
from tests.engine.mlx_engine import Engine, Oracle, assert_agrees, make_engine
from tests.kernels import gpu as fake
from tests.kernels import shim
from tests.kernels.gpu import Around, Gpu
from tests.kernels.test_metal_text import first_words

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

_rng = np.random.default_rng(5)
PROMPTS = [tuple(_rng.integers(3, tiny_models.VOCAB, n).tolist()) for n in (5, 20)]


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A Metal device whose kernels are all faster than MLX's operations."""
    gpu = fake.install("metal", shim.maker(), monkeypatch)
    fake.time_by_clock(gpu, monkeypatch)
    monkeypatch.setattr(choice, "STEPS", ((2, 64), (1, 192)))
    monkeypatch.setattr(choice, "CHAIN", 2)
    for others in ("shorter", "wider"):  # compiling them takes seconds; test_attention_choice has them
        monkeypatch.setattr(choice, others, lambda *args: ())
    monkeypatch.setattr(sampling, "ROWS", 2)
    monkeypatch.setattr(warm_up, "SLOW", float("inf"))  # emulated, a step takes long on a machine with other work
    monkeypatch.setattr(lora, "_TOKENS", (1, 16))
    mx.disable_compile()  # the shim computes at once; while a step is traced there are no numbers
    yield gpu
    mx.enable_compile()
    inplace.given(None)


def start(tmp_path: Path, kept: Kept | None = None, *, prepare: bool = True) -> Engine:
    folder = tiny_models.make(tmp_path / "model", "llama")
    engine = make_engine(folder, num_blocks=12, kept=kept, prepare=prepare)
    engine.built.warm_up(CostModel())
    return engine


def assert_serves(engine: Engine, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3)
    loop = engine.run([Request(i, prompt, params) for i, prompt in enumerate(PROMPTS)], chunks=16)
    assert_agrees(loop, Oracle.load(tmp_path / "model"), "at the end")


def short_blocks(engine: Engine) -> bool:
    return any(isinstance(m, FusedBlock) for m in engine.built.runner.module.modules())


@pytest.mark.parametrize("family", ["mamba", "mamba2", "rwkv7"])
def test_models_without_attention_start_and_serve(metal: Gpu, tmp_path: Path, family: str) -> None:
    """They have a pool without layers, so that nothing in it is ordered."""
    engine = make_engine(tiny_models.make(tmp_path / "model", family), num_blocks=12)
    engine.built.warm_up(CostModel())
    assert inplace.writing().by_outputs
    assert_serves(engine, tmp_path)


def test_all_kernels_are_taken_where_they_are_right_and_faster(metal: Gpu, tmp_path: Path) -> None:
    engine = start(tmp_path)
    info = engine.built.info
    assert info.attention_backend == "metal" and info.lora_backend == "fused"
    assert info.attention_reason.startswith("faster: ") and "own code" not in info.attention_reason
    assert inplace.writing().store is not None and short_blocks(engine)
    assert not engine.built.runner.one_at_a_time
    assert_serves(engine, tmp_path)


HYBRID = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
"""Heads of the states that are wide enough for the kernels."""


def start_hybrid(tmp_path: Path, kept: Kept | None = None, *, prepare: bool = True) -> Engine:
    folder = tiny_models.make(tmp_path / "model", "qwen3_5", **HYBRID)
    engine = make_engine(folder, num_blocks=24, kept=kept, prepare=prepare)
    engine.built.warm_up(CostModel())
    return engine


def fused_nets(engine: Engine) -> bool:
    return any(isinstance(m, FusedDeltaNet) for m in engine.built.runner.module.modules())


def test_a_hybrid_s_states_stay_in_the_pool(metal: Gpu, tmp_path: Path) -> None:
    """Also of rows that are padding, all of which have one line, and of rows that go on in the line that they read."""
    engine = start_hybrid(tmp_path)
    assert fused_nets(engine) and gated_delta.kernel() is not None
    assert engine.built.runner._forward.gathered_share == 0.0
    assert {name.partition("_")[0] for name, _ in metal.sources} <= first_words(), "a text that nothing has checked"
    assert_serves(engine, tmp_path)


SLOWER = {
    "gated_delta_in_place": "mlx-lm's own functions compute the gated delta rule: the kernel is ",
    "delta_net_inputs": "gated delta nets run their own code: the fused path is ",
}


@pytest.mark.parametrize("fault", ["uncompilable", "slow"])
@pytest.mark.parametrize("kernel", SLOWER)
def test_a_hybrid_starts_without_a_kernel_that_is(
    metal: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, kernel: str, fault: str
) -> None:
    caplog.set_level("INFO")
    metal.faults[kernel] = fake.slow(metal) if fault == "slow" else fake.uncompilable
    engine = start_hybrid(tmp_path)
    said = SLOWER[kernel] + "slower: " if fault == "slow" else SLOWER[kernel].removesuffix("the fused path is ")
    assert said in caplog.text
    assert not fused_nets(engine)
    assert (gated_delta.kernel() is None) == (kernel == "gated_delta_in_place")
    assert engine.built.runner._forward.gathered_share > 0.0
    assert_serves(engine, tmp_path)


WRONG: dict[str, Around] = {
    "paged_attention": fake.instead("k <= position", "k < position"),
    "rotary": fake.instead("a * c - b * s", "a * c + b * s"),
    "store": fake.instead("= lines[from + i]", "= lines[from + i] + T(1)"),
    "lora_shrink": fake.instead("= total;", "= 2.0f * total;"),
    "gumbel_max": fake.instead("logits + begin", "logits"),
}

SAYS = {
    "paged_attention": "attention by portable: metal is not used: ",
    "rotary": "attention blocks run their own code: ",
    "store": "MLX's own operations write the KV pool: the kernel that writes in place is ",
    "lora_shrink": "fused kernels are not used: ",
    "gumbel_max": "sampling: the kernels are not used: ",
}

WHY = {
    "uncompilable": r"RuntimeError: \[metal::Device\] Unable to build",
    "wrong": r"(on the fused path their logits are off|wrong|token -?\d+ instead of \d+)",
    "slow": r"(a step of 16 rows takes|slower)",
}


@pytest.mark.parametrize("fault", WHY)
@pytest.mark.parametrize("kernel", SAYS)
def test_a_server_starts_without_a_kernel_that_is(
    metal: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, kernel: str, fault: str
) -> None:
    caplog.set_level("INFO")
    ways = {"uncompilable": fake.uncompilable, "wrong": WRONG[kernel], "slow": fake.slow(metal)}
    metal.faults[kernel] = ways[fault]
    engine = start(tmp_path)
    assert re.search(re.escape(SAYS[kernel]) + "[^\n]*" + WHY[fault], caplog.text)
    info = engine.built.info
    assert (info.attention_backend == "metal") == (kernel != "paged_attention")
    assert (info.lora_backend == "fused") == (kernel != "lora_shrink")
    assert short_blocks(engine) == (kernel not in ("paged_attention", "rotary", "store"))
    assert (inplace.writing().store is None) == (kernel == "store")
    assert_serves(engine, tmp_path)


def test_a_second_start_checks_little_and_times_nothing(
    metal: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path / "kept")
    first = start(tmp_path, kept)

    def refuse(*args: Any) -> NoReturn:
        raise AssertionError("a second start times nothing")

    monkeypatch.setattr(checking, "seconds", refuse)
    monkeypatch.setattr(choice, "_seconds", refuse)
    second = start(tmp_path, kept)
    assert second.built.info.attention_backend == "metal" and second.built.info.lora_backend == "fused"
    assert second.built.info.attention_reason == first.built.info.attention_reason
    assert short_blocks(second)
    assert_serves(second, tmp_path)


@pytest.mark.parametrize("kernel", WRONG)
def test_a_second_start_notices_that_a_kernel_has_become_wrong(
    metal: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, kernel: str
) -> None:
    kept = Kept(tmp_path / "kept")
    start(tmp_path, kept)
    metal.faults[kernel] = WRONG[kernel]
    engine = start(tmp_path, kept)
    assert "everything is checked anew" in caplog.text
    assert_serves(engine, tmp_path)


RULE = fake.instead("float(beta[token * HV + head])", "0.5f * float(beta[token * HV + head])")


def test_a_second_start_of_a_hybrid_notices_that_the_rule_has_become_wrong(
    metal: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path / "kept")
    start_hybrid(tmp_path, kept)
    metal.faults |= {"gated_delta": RULE, "gated_delta_in_place": RULE}
    gated_delta.kernel.cache_clear()
    engine = start_hybrid(tmp_path, kept)
    assert "everything is checked anew" in caplog.text
    assert_serves(engine, tmp_path)


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that the device says it needed at most beside what it did, at one look after the other."""
    more: list[int] = []
    peak = mx.get_peak_memory
    monkeypatch.setattr(mx, "get_peak_memory", lambda: peak() + (more.pop(0) if more else 0))
    return more


def test_memory_that_grows_once_is_looked_at_again(
    metal: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, growth: list[int]
) -> None:
    """A GPU may give back what operations held only after they are done."""
    growth.append(1 << 30)
    engine = start(tmp_path)
    assert "once decode steps used 102" in caplog.text and "looked at again they did not" in caplog.text
    assert not engine.built.runner.one_at_a_time
    assert_serves(engine, tmp_path)


@pytest.mark.parametrize("kind", ["decode steps", "chunks, copies, loads and forks"])
def test_steps_that_need_memory_in_flight_go_one_at_a_time(
    metal: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, growth: list[int], kind: str
) -> None:
    growth += [1 << 30] * 4 if kind == "decode steps" else [0, 1 << 30] * 2
    engine = start(tmp_path)
    assert re.search(
        f"each step is dispatched when the one before is done: in flight together {kind} used", caplog.text
    )
    assert engine.built.runner.one_at_a_time
    assert_serves(engine, tmp_path)


def test_a_pool_that_is_copied_whatever_is_done_ends_the_start(metal: Gpu, tmp_path: Path, growth: list[int]) -> None:
    growth += [1 << 30] * 8
    with pytest.raises(RuntimeError, match="the pool is copied instead of written in place"):
        start(tmp_path)


def test_steps_that_disturb_each_other_go_one_at_a_time(
    metal: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device on which what a chunk writes is lost while another step is in flight."""
    in_flight = 0
    launch, wait = MLXRunner.launch, MLXRunner.wait

    def counted_launch(self: MLXRunner, plan: StepPlan) -> Flight:
        nonlocal in_flight
        in_flight += 1
        return launch(self, plan)

    def counted_wait(self: MLXRunner, handle: Flight) -> StepResult:
        nonlocal in_flight
        in_flight -= 1
        return wait(self, handle)

    def lossy(source: Source, make: Make) -> Kernel:
        kernel = make(source)

        def call(inputs: Sequence[mx.array], *rest: Any) -> list[mx.array]:
            if in_flight > 1:
                inputs = [mx.array(x) if n in source.writes else x for n, x in zip(source.inputs, inputs, strict=True)]
            return kernel(inputs, *rest)

        return call

    monkeypatch.setattr(MLXRunner, "launch", counted_launch)
    monkeypatch.setattr(MLXRunner, "wait", counted_wait)
    metal.faults["rotary"] = lossy
    engine = start(tmp_path)
    assert "each step is dispatched when the one before is done: in flight together they disturb" in caplog.text
    assert engine.built.runner.one_at_a_time


def load_first_adapter(engine: Engine) -> tuple[str, str]:
    """Do what the engine does piece by piece before it serves its first adapter; return the back end and the reason."""
    assert engine.built.info.lora_reason == build.LATER and engine.built.prepare_adapters is not None
    return finish(engine.built.prepare_adapters())


def assert_serves_an_adapter(engine: Engine, tmp_path: Path) -> None:
    """Beside the base, whose answers are its own."""
    linears = engine.built.linears
    deltas = tiny_models.make_adapter(tmp_path / "adapter", linears, "peft", rank=8, seed=2)
    weights = formats.read(tmp_path / "adapter", linears, max_rank=16, base_layers=engine.built.layers)
    digest = weights.info.digest
    engine.weights[digest] = weights
    base, adapted = (Oracle.load(tmp_path / "model") for _ in range(2))
    tiny_models.merge(adapted.model, deltas)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3)
    asked = [
        Request(2 * i + (ref is not None), prompt, params, ref)
        for i, prompt in enumerate(PROMPTS)
        for ref in (None, AdapterRef("adapter", 1, digest))
    ]
    assert_agrees(engine.run(asked, chunks=16), {None: base, digest: adapted}, "an adapter beside the base")


MOST_KERNELS = 40
"""Most kernels of our own that a start compiles before it is ready."""

VARIANTS = 5
"""Kernels of attention that the fixture leaves out: those of other divisions, which a start compiles and times, too."""


@pytest.mark.parametrize("prepare", [False, True], ids=["without adapters", "with adapters"])
def test_a_start_compiles_few_kernels(metal: Gpu, tmp_path: Path, prepare: bool) -> None:
    """And the next one fewer still."""
    kept = Kept(tmp_path / "kept")
    start(tmp_path, kept, prepare=prepare)
    first = len(metal.forms) + VARIANTS
    assert first <= MOST_KERNELS
    metal.forms.clear()
    start(tmp_path, kept, prepare=prepare)
    assert 0 < len(metal.forms) < first


@pytest.mark.parametrize("prepare", [False, True], ids=["without adapters", "with adapters"])
def test_a_start_of_a_hybrid_compiles_few_kernels(metal: Gpu, tmp_path: Path, prepare: bool) -> None:
    """And only those that may serve: of states none outside the pool, of merged linears none for outputs apart."""
    start_hybrid(tmp_path, Kept(tmp_path / "kept"), prepare=prepare)
    assert len(metal.forms) + VARIANTS <= MOST_KERNELS
    names = {form[0] for form in metal.forms}
    assert names.isdisjoint({"gated_delta", "lora_expand_2_apart", "lora_expand_3_apart"})


def of_adapters(gpu: Gpu) -> set[str]:
    """The kernels of adapters that were made so far."""
    return {name for name, _ in gpu.sources if name.startswith("lora")}


def test_a_start_without_adapters_makes_no_kernels_of_theirs(metal: Gpu, tmp_path: Path) -> None:
    engine = start(tmp_path, prepare=False)
    assert not of_adapters(metal)
    assert_serves(engine, tmp_path)
    assert not of_adapters(metal)
    backend, reason = load_first_adapter(engine)
    assert of_adapters(metal) and backend == "fused" and reason.startswith("faster, ")
    assert_serves_an_adapter(engine, tmp_path)


@pytest.mark.parametrize("fault", WHY)
def test_an_adapter_that_is_loaded_later_is_served_without_a_kernel_that_is(
    metal: Gpu, tmp_path: Path, fault: str
) -> None:
    engine = start(tmp_path, prepare=False)
    ways = {"uncompilable": fake.uncompilable, "wrong": WRONG["lora_shrink"], "slow": fake.slow(metal)}
    metal.faults["lora_shrink"] = ways[fault]
    backend, reason = load_first_adapter(engine)
    assert backend == "gather" and re.search(SAYS["lora_shrink"] + "[^\n]*" + WHY[fault], reason)
    assert_serves_an_adapter(engine, tmp_path)


def test_what_is_chosen_for_adapters_later_is_kept_for_the_next_start(
    metal: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked once more when an adapter is loaded, and at start where adapters are configured by then."""
    kept = Kept(tmp_path / "kept")
    chosen = load_first_adapter(start(tmp_path, kept, prepare=False))
    metal.sources.clear()

    def refuse(*args: Any) -> NoReturn:
        raise AssertionError("nothing is timed again")

    monkeypatch.setattr(checking, "seconds", refuse)
    monkeypatch.setattr(lora, "_times", refuse)
    engine = start(tmp_path, kept, prepare=False)
    assert not of_adapters(metal)
    assert load_first_adapter(engine) == chosen and of_adapters(metal)
    assert_serves_an_adapter(engine, tmp_path)
    assert start(tmp_path, kept).built.info.lora_reason == chosen[1]


def test_only_adapters_are_timed_where_they_are_configured_since_the_last_start(
    metal: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path / "kept")
    start(tmp_path, kept, prepare=False)
    monkeypatch.setattr(choice, "_seconds", lambda *args: pytest.fail("attention is timed again"))
    first = start(tmp_path, kept)
    assert first.built.info.lora_backend == "fused" and first.built.prepare_adapters is None
    monkeypatch.setattr(lora, "_times", lambda *args: pytest.fail("adapters are timed again"))
    assert start(tmp_path, kept).built.info.lora_reason == first.built.info.lora_reason


def test_an_adapter_that_is_loaded_later_notices_that_its_kernel_has_become_wrong(
    metal: Gpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path / "kept")
    load_first_adapter(start(tmp_path, kept, prepare=False))
    metal.faults["lora_shrink"] = WRONG["lora_shrink"]
    engine = start(tmp_path, kept, prepare=False)
    assert load_first_adapter(engine)[0] == "gather"
    assert "checked anew, because with the choices of the last start wrong by" in caplog.text
    assert_serves_an_adapter(engine, tmp_path)


class Loading(EngineChannel):
    """Has an engine load an adapter while a request for the base runs, then asks for the adapter, and hangs up when
    both have ended."""

    def __init__(self, folder: Path, gpu: Gpu):
        self.folder, self.gpu = folder, gpu
        self.sent: list[Any] = []
        self.made_at_ready: set[str] | None = None
        self.digest = ""

    def receive(self, wait: float) -> list[m.Inbound]:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        if self.made_at_ready is None:
            self.made_at_ready = of_adapters(self.gpu)
            load = m.LoadAdapter(1, AdapterSource(str(self.folder)))
            return [load, m.Submit(Request(2, PROMPTS[0], structs.replace(params, max_tokens=40)))]
        if not self.digest and (loaded := [x for x in self.sent if isinstance(x, m.AdapterLoaded)]):
            self.digest = loaded[0].info.digest
            return [m.Submit(Request(3, PROMPTS[1], params, AdapterRef("adapter", 1, self.digest)))]
        if {2, 3} <= {d.request for d in self.deltas if d.finish}:
            raise WireError("over")
        return []

    def send(self, messages: Sequence[m.Inbound | m.Outbound]) -> None:
        self.sent += messages

    @property
    def deltas(self) -> list[Delta]:
        return [d for x in self.sent if isinstance(x, m.Output) for d in x.deltas]

    def tokens(self, request: int) -> list[int]:
        return [t for d in self.deltas if d.request == request for t in d.tokens]


def test_an_engine_makes_its_first_adapter_s_kernels_ready_between_the_steps_of_others(
    metal: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tiny_models.make(tmp_path / "model", "llama")
    oracle = Oracle.load(folder)
    linears = make_engine(folder, num_blocks=12, prepare=False).built.linears
    deltas = tiny_models.make_adapter(tmp_path / "adapter", linears, "peft", rank=8, seed=2)
    inplace.writing.cache_clear()
    metal.sources.clear()
    config = EngineConfig(
        ModelConfig(str(folder)), CacheConfig(block_size=8, num_blocks=24), lora=LoraConfig(1, 8), duty=DutyConfig()
    )
    channel = Loading(tmp_path / "adapter", metal)

    def engine() -> None:
        with suppress(WireError):
            serve(channel, config, False)

    thread = Thread(target=engine)  # is done with the device after it
    thread.start()
    thread.join()
    first, second = (x.info for x in channel.sent if isinstance(x, m.Ready))
    assert (first.lora_reason, second.lora_backend) == (build.LATER, "fused")
    assert channel.made_at_ready == set() and of_adapters(metal)
    loaded = next(i for i, x in enumerate(channel.sent) if isinstance(x, m.AdapterLoaded))
    assert any(isinstance(x, m.Output) for x in channel.sent[:loaded]), "nobody was served meanwhile"
    for request, prompt in ((2, PROMPTS[0]), (3, PROMPTS[1])):
        if request == 3:
            tiny_models.merge(oracle.model, deltas)
            oracle = Oracle(oracle.model)
        said = channel.tokens(request)
        likeliest = oracle.logprobs(prompt, said).max(-1)
        chosen = oracle.logprobs(prompt, said)[np.arange(len(said)), said]
        assert len(said) == (40 if request == 2 else 6) and np.allclose(chosen, likeliest, atol=1e-4)
