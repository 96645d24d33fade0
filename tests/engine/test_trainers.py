"""Trainers through their life: steps, taking back, publishing, saving and resuming."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from mlx_tandem.adapters import formats
from mlx_tandem.engine.learning import AdamParams, Batch, Datum, LossConfig, LossKind, TrainerSpec, Truncation
from mlx_tandem.engine.plan import DeviceError, OutOfMemory
from mlx_tandem.engine.trainers import Pause
from mlx_tandem.errors import InvalidRequest, ModelError, NotFound
from mlx_tandem.model import backend
from mlx_tandem.model.ops.lora.slots import Uploads
from mlx_tandem.training.device import copies, trained_adapter
from mlx_tandem.training.device.slices import device_errors
from mlx_tandem.training.device.trainers import MLXTrainers
from tests import tiny_models
from tests.backends import answer_as
from tests.engine.learning import base_leaves, finish, largest_difference, some_data, strengthen, trainers_of

SPEC = TrainerSpec("a", 4, 8.0, seed=5)
ADAM = AdamParams(1e-2, grad_norm=1.0, weight_decay=0.01)


@pytest.fixture
def trainers(tmp_path: Path) -> MLXTrainers:
    made = trainers_of(tiny_models.make(tmp_path / "model", "qwen3"))
    made.open(SPEC, "", None)
    return made


def learn(trainers: MLXTrainers, seed: int, name: str = "a") -> None:
    finish(trainers.run([Batch(name, tuple(some_data(seed)), LossConfig("cross_entropy"))], False, 0))
    assert finish(trainers.step(name, ADAM)).finite
    trainers.settle(name, True)


def weights_of(trainers: MLXTrainers, name: str = "a") -> dict[str, Any]:
    return {path: (np.array(a), np.array(b)) for path, (a, b) in trainers._trainers[name].pairs.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(x, y) for path in one for x, y in zip(one[path], other[path], strict=True))


def test_learning_lowers_the_loss_and_leaves_the_base_alone(trainers: MLXTrainers) -> None:
    data = tuple(msgspec.structs.replace(d, weights=(1.0,) * len(d.weights)) for d in some_data())
    batch = Batch("a", data, LossConfig("cross_entropy", normalize="token_mean"))
    base = [np.array(p) for _, p in base_leaves(trainers)]
    first = finish(trainers.run([batch], True, 0))[0].loss
    for _ in range(12):
        finish(trainers.run([batch], False, 0))
        finish(trainers.step("a", AdamParams(2e-2)))
    assert finish(trainers.run([batch], True, 0))[0].loss < 0.8 * first
    assert all(np.array_equal(p, now) for p, (_, now) in zip(base, base_leaves(trainers), strict=True))


def test_a_fresh_trainer_is_the_base(trainers: MLXTrainers) -> None:
    data = some_data()
    (result,) = finish(trainers.run([Batch("a", tuple(data), LossConfig(kl_coef=1.0))], True, 0))
    assert result.kl_reference == 0.0


def goes_on_from_the_first_step(trainers: MLXTrainers) -> None:
    """The optimiser's state is that of one step, too: the next is the one that would have come."""
    learn(trainers, 2)
    after = weights_of(trainers)
    trainers.open(SPEC, "", None)
    learn(trainers, 0)
    learn(trainers, 2)
    assert same(weights_of(trainers), after)


@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "cispo", "dro"])
def test_logprobs_that_are_not_given_are_the_trainer_s_own(trainers: MLXTrainers, kind: LossKind) -> None:
    """As if a pass had been made for them before; of some sequences or of all."""
    strengthen(trainers, "a")
    data = some_data()
    (seen,) = finish(trainers.run([Batch("a", tuple(data), LossConfig("cross_entropy"))], True, 0))
    given = [msgspec.structs.replace(d, logprobs=p) for d, p in zip(data, seen.logprobs, strict=True)]
    for some in (range(len(data)), (1, 2)):
        left = [msgspec.structs.replace(d, logprobs=None) if i in some else d for i, d in enumerate(given)]
        found = []
        for each in (given, left):
            (result,) = finish(trainers.run([Batch("a", tuple(each), LossConfig(kind, ratio="sequence"))], False, 0))
            found.append((result.loss, trainers._trainers["a"]._gradients))
            trainers.drop_gradients("a")
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
        assert largest_difference(found[1][1], found[0][1]) < 1e-4


def test_a_step_is_taken_back_whole(trainers: MLXTrainers) -> None:
    learn(trainers, 0)
    before = weights_of(trainers)
    finish(trainers.run([Batch("a", tuple(some_data(1)), LossConfig())], False, 0))
    assert finish(trainers.step("a", ADAM)).step == 2
    assert not same(weights_of(trainers), before)
    trainers.settle("a", False)
    assert same(weights_of(trainers), before)
    goes_on_from_the_first_step(trainers)


def test_nothing_is_kept_of_a_step_that_was_taken_back(trainers: MLXTrainers) -> None:
    trainers.open(TrainerSpec("a", 64, 64.0), "", None)
    learn(trainers, 0)
    trainers.settle("a", True)
    before = mx.get_active_memory()
    finish(trainers.run([Batch("a", tuple(some_data(1)), LossConfig())], False, 0))
    finish(trainers.step("a", ADAM))
    trainers.publish("a")()
    trainers.settle("a", False)
    mx.synchronize()  # what was published is launched, and nobody has waited for it
    assert mx.get_active_memory() - before < 4 * trainers._trainers["a"].info.parameters


def test_steps_that_belong_together_are_kept_or_taken_back_together(trainers: MLXTrainers) -> None:
    learn(trainers, 1)
    batch = Batch("a", tuple(some_data(2)), LossConfig("cross_entropy"))
    before = weights_of(trainers)
    for keep in (False, True):
        for count in (1, 2, 3):
            finish(trainers.run([batch], False, 0))
            assert finish(trainers.step("a", ADAM, count < 3)).step == 1 + count
        trainers.settle("a", keep)
        assert same(weights_of(trainers), before) != keep
    last = weights_of(trainers)
    finish(trainers.run([batch], False, 0))
    finish(trainers.step("a", ADAM))
    trainers.settle("a", False)
    assert same(weights_of(trainers), last), "what was kept is not taken back with the next step"


def truncated(logits: Any, temperature: float, cut: Truncation) -> Any:
    """The logprobs of one position's tokens, by sorting: min_p, top_k, then top_p of the rest."""
    p = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-p)
    kept = [t for t in order if p[t] >= cut.min_p][: cut.top_k or None]
    inside, mass = [], 0.0
    for t in kept:
        if mass < cut.top_p * p[kept].sum():
            inside.append(t)
            mass += p[t]
    found = np.full(len(p), -np.inf)
    found[inside] = np.log(p[inside] / p[inside].sum())
    return found


@pytest.mark.parametrize(
    "cut", [Truncation(0.5), Truncation(top_k=7), Truncation(min_p=0.3), Truncation(0.8, 20, 0.05)]
)
def test_truncated_draws_are_compared_with_the_same_truncation(trainers: MLXTrainers, cut: Truncation) -> None:
    """The logprobs are those of the draw; a token that it could not take is not trained."""
    learn(trainers, 1)
    plain = msgspec.structs.replace(some_data(3)[0], temperature=0.7, logprobs=None)
    every = []
    for token in range(tiny_models.VOCAB):
        data = msgspec.structs.replace(
            plain, tokens=(*plain.tokens[: plain.prompt_length], token), weights=(1.0,), mask=(1,)
        )
        every.append(data)
    results = finish(trainers.run([Batch("a", tuple(every), LossConfig("ppo"))], True, 0))[0]
    logits = np.array([own[0] for own in results.model_logprobs], np.float64)
    wanted = truncated(logits, 0.7, cut)
    cutting = tuple(msgspec.structs.replace(d, truncation=cut) for d in every)
    found = finish(trainers.run([Batch("a", cutting, LossConfig("ppo"))], True, 0))[0]
    assert np.array([own[0] for own in found.logprobs]) == pytest.approx(wanted, abs=2e-5)
    assert np.isinf(wanted).any()
    best, worst = int(np.argmax(logits)), int(np.argmin(logits))
    for token, trained in ((best, cut.top_p != 0.5), (worst, False)):
        for kl in (0.0, 0.1):
            batch = Batch("a", (cutting[token],), LossConfig("ppo", kl_coef=kl))
            finish(trainers.run([batch], False, 0))
            norm = finish(trainers.step("a", AdamParams(0.0))).grad_norm
            assert np.isfinite(norm)
            if token == worst and not kl:
                assert norm == 0.0, "a token that could not be drawn has no gradient"
            elif trained:
                assert norm > 0.0


def test_a_pass_says_between_its_micro_batches_how_much_of_it_is_done(trainers: MLXTrainers) -> None:
    data = tuple(some_data())
    slices = trainers.run([Batch("a", data, LossConfig())], True, len(data[0].tokens))
    done = [wait.done for wait in slices if isinstance(wait, Pause)]
    assert done == sorted(set(done)) and done
    assert done[0] > 0.0 and done[-1] < 1.0


def test_a_pass_without_data_finds_nothing(trainers: MLXTrainers) -> None:
    (result,) = finish(trainers.run([Batch("a", (), LossConfig())], False, 0))
    assert (result.loss, result.tokens, result.logprobs) == (0.0, 0, ())
    assert finish(trainers.run([], True, 0)) == ()


@pytest.mark.promise("I6")
def test_gradients_that_are_not_finite_change_nothing(trainers: MLXTrainers) -> None:
    learn(trainers, 0)
    before = weights_of(trainers)
    finish(trainers.run([Batch("a", tuple(some_data(1)), LossConfig("cross_entropy", scale=1e38))], False, 0))
    done = finish(trainers.step("a", ADAM))
    assert not done.finite
    assert done.step == 1
    assert same(weights_of(trainers), before)


def test_a_step_without_gradients_is_none(trainers: MLXTrainers) -> None:
    done = finish(trainers.step("a", ADAM))
    assert (done.step, done.grad_norm) == (0, 0.0)


def test_a_step_says_how_far_its_gradient_agrees_with_earlier_ones(trainers: MLXTrainers) -> None:
    mean: np.ndarray | None = None
    for seed in (0, 0, 1):
        finish(trainers.run([Batch("a", tuple(some_data(seed)), LossConfig("cross_entropy"))], False, 0))
        sums = trainers._trainers["a"].gradients.values()
        gradient = np.concatenate([np.array(x).reshape(-1) * f for a, b in sums for x, f in ((a, 1.0), (b, 2.0))])
        done = finish(trainers.step("a", ADAM))
        trainers.settle("a", True)
        if mean is None:
            assert done.agreement is None, "there is no earlier one"
            mean = np.zeros_like(gradient)
        else:
            wanted = mean @ gradient / np.linalg.norm(mean) / np.linalg.norm(gradient)
            assert done.agreement == pytest.approx(wanted, abs=1e-4)
            assert (done.agreement > 0.9) == (seed == 0)
        clipped = gradient * min(1.0, ADAM.grad_norm / done.grad_norm)
        mean = ADAM.beta1 * mean + (1.0 - ADAM.beta1) * clipped


@pytest.mark.parametrize("together", [1, 2, 100])
def test_a_step_is_the_same_in_slices_of_any_size(
    together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for count in (1, together):
        monkeypatch.setattr(trained_adapter, "CHUNK_PARAMETERS", 200)
        answer_as(monkeypatch, learning=replace(backend.current().learning, step_chunks=count))
        own = trainers_of(tiny_models.make(tmp_path / f"model-{count}", "qwen3"))
        own.open(SPEC, "", None)
        finish(own.run([Batch("a", tuple(some_data(1)), LossConfig())], False, 0))
        step, slices = own.step("a", ADAM), 0
        while True:
            try:
                next(step)()
            except StopIteration as e:
                found.append((e.value, weights_of(own)))
                break
            slices += 1
        chunks = len(own._trainers["a"]._chunks)
        assert chunks > 4 and slices == 2 * -(-chunks // count)
    assert found[0][0] == found[1][0] and same(found[0][1], found[1][1])


def test_logits_are_gone_when_the_layers_have_their_turn(tmp_path: Path) -> None:
    """They are larger than all that a layer needs. 72 positions of 16,384 numbers here."""
    own = trainers_of(tiny_models.make(tmp_path / "model", "qwen3", vocab_size=16_384))
    own.open(SPEC, "", None)
    data = tuple(some_data(lengths=((40, 4), (40, 4))))
    seen = []
    for wait in own.run([Batch("a", data, LossConfig("ppo", kl_coef=0.1))], False, 80):
        wait()
        seen.append(mx.get_active_memory())
    logits = 72 * 16_384 * 4
    assert max(seen[-4:]) - seen[0] < logits / 2


@pytest.mark.parametrize("slices", [1, 3])
def test_a_step_that_is_dropped_half_done_changes_nothing(
    trainers: MLXTrainers, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained_adapter, "CHUNK_PARAMETERS", 8)
    trainers.open(SPEC, "", None)
    learn(trainers, 0)
    before = weights_of(trainers)
    finish(trainers.run([Batch("a", tuple(some_data(1)), LossConfig())], False, 0))
    step = trainers.step("a", ADAM)
    for _ in range(slices):
        next(step)
    step.close()
    assert same(weights_of(trainers), before)
    goes_on_from_the_first_step(trainers)


def test_an_abandoned_pass_leaves_no_gradients(trainers: MLXTrainers) -> None:
    slices = trainers.run([Batch("a", tuple(some_data()), LossConfig())], False, 0)
    for _ in range(8):
        next(slices)
    slices.close()
    trainers.drop_gradients("a")
    assert finish(trainers.step("a", ADAM)).grad_norm == 0.0


@pytest.mark.promise("FLT-33")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("alpha", [8.0, 10.0])  # a scale of 2 is exact both ways, one of 2.5 is not
def test_what_is_saved_is_what_is_published_and_resumes_to_the_bit(family: str, alpha: float, tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "model", family)
    trainers = trainers_of(folder)
    trainers.open(TrainerSpec("a", 4, alpha, seed=5), "", None)
    learn(trainers, 0)
    learn(trainers, 1)
    (tmp_path / "saved").mkdir()
    trainers.snapshot("a")(str(tmp_path / "saved"))
    published = trainers.publish("a")()
    read = formats.read(tmp_path / "saved", trainers._tree.linears, max_rank=64, base_layers=2)
    assert read.info == published.info
    saved = weights_of(trainers)
    learn(trainers, 2)
    wanted = weights_of(trainers)

    resumed = trainers_of(folder)
    info = resumed.open(TrainerSpec("a", 1, 1.0), str(tmp_path / "saved"), None)
    assert (info.rank, info.alpha, info.step) == (4, alpha, 2)
    assert same(weights_of(resumed), saved)
    assert resumed.publish("a")().info == published.info
    learn(resumed, 2)
    assert same(weights_of(resumed), wanted)


def test_an_activated_adapter_is_not_resumed(trainers: MLXTrainers, tmp_path: Path) -> None:
    trainers.snapshot("a")(str(tmp_path))
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": [5]}))
    with pytest.raises(InvalidRequest, match="alora_invocation_tokens"):
        trainers.open(TrainerSpec("b", 1, 1.0), str(tmp_path), None)


def test_other_threads_publish_and_save_a_fresh_trainer(trainers: MLXTrainers, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(trainers.snapshot("a"), str(tmp_path / "saved")).result()
        published = thread.submit(trainers.publish("a")).result()
    read = formats.read(tmp_path / "saved", trainers._tree.linears, max_rank=64, base_layers=2)
    assert read.info == published.info


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_a_copy_is_read_on_another_thread_as_it_was_made(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, whatever becomes of the array meanwhile."""
    monkeypatch.setattr(copies, "PIECE", piece)
    values = np.array([-0.0, 1e-42, np.inf, 3.0, -1.5, 2.0**-126, 7.0, 0.1, -1e38], np.float32)
    whole = mx.array(values)
    mx.eval(whole)
    copy = copies.Copy(whole)
    whole = None
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(copy.read).result()
    assert read.tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_served_is_what_is_published(dtype: str, tmp_path: Path) -> None:
    """The bits that a slot would get from the published weights, with a scale that is not exact."""
    folder = tiny_models.make(tmp_path / "model", "qwen3_moe")
    trainers = trainers_of(folder)
    told: list[tuple[Any, dict[str, Any]]] = []
    trainers._prepare = lambda weights, served: told.append((weights, served))
    trainers.open(TrainerSpec("a", 3, 10.0, seed=5), "", None)
    learn(trainers, 0)
    trainers._tree.dtype = getattr(mx, dtype)
    with ThreadPoolExecutor(1) as thread:
        published = thread.submit(trainers.publish("a")).result()
    ((weights, served),) = told
    assert weights is published and served.keys() == weights.tensors.keys()
    for path, pair in Uploads(trainers._tree.dtype).take(weights).items():
        for x, own in zip(pair, served[path], strict=True):
            assert mx.array_equal(x.view(own.dtype), own), path


@pytest.mark.promise("FLT-31")
def test_a_damaged_checkpoint_is_refused(trainers: MLXTrainers, tmp_path: Path) -> None:
    learn(trainers, 0)
    for name in ("trainer.json", "optimizer.safetensors", "adapter_model.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        trainers.snapshot("a")(str(folder))
        (folder / name).write_bytes((folder / name).read_bytes()[:-9])
        with pytest.raises((InvalidRequest, ModelError)):
            trainers.open(SPEC, str(folder), None)


def test_beginning_with_an_adapter(trainers: MLXTrainers) -> None:
    """Its weights under a larger rank give the same model; it then learns on."""
    learn(trainers, 0)
    adapter = trainers.publish("a")()
    batch = tuple(some_data(3))
    (wanted,) = finish(trainers.run([Batch("a", batch, LossConfig())], True, 0))
    trainers.open(TrainerSpec("b", 8, 4.0), "", adapter)
    (found,) = finish(trainers.run([Batch("b", batch, LossConfig())], True, 0))
    assert np.allclose(np.concatenate(found.logprobs), np.concatenate(wanted.logprobs), atol=1e-4)
    with pytest.raises(ModelError, match="rank"):
        trainers.open(TrainerSpec("c", 2, 4.0), "", adapter)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tokens": (5, 6, 300)}, "batches[0].data[0].tokens"),
        ({"tokens": (5, -1, 7)}, "batches[0].data[0].tokens"),
        ({"prompt_length": 0}, "batches[0].data[0]"),
        ({"prompt_length": 3}, "batches[0].data[0]"),
        ({"weights": (1.0,)}, "batches[0].data[0]"),
        ({"weights": (1.0, float("nan"))}, "batches[0].data[0]"),
        ({"logprobs": ()}, "batches[0].data[0]"),
        ({"logprobs": (-1.0, float("-inf"))}, "batches[0].data[0]"),
        ({"temperature": 0.0}, "batches[0].data[0]"),
    ],
)
def test_data_that_cannot_be_trained_on(trainers: MLXTrainers, change: dict[str, Any], param: str) -> None:
    datum = msgspec.structs.replace(Datum((5, 6, 7), 1, (1.0, 1.0), (-1.0, -1.0)), **change)
    with pytest.raises(InvalidRequest) as e:
        trainers.run([Batch("a", (datum,), LossConfig())], False, 0)
    assert e.value.param is not None
    assert e.value.param.startswith(param)


@pytest.mark.promise("FLT-55")
def test_trainers_that_cannot_be(trainers: MLXTrainers) -> None:
    for spec, param in (
        (TrainerSpec("b", 0, 1.0), "rank"),
        (TrainerSpec("b", 8, 0.0), "alpha"),
        (TrainerSpec("b", 8, 1.0, ("no_proj",)), "targets"),
    ):
        with pytest.raises(InvalidRequest) as e:
            trainers.open(spec, "", None)
        assert e.value.param == param
    with pytest.raises(NotFound):
        finish(trainers.step("b", ADAM))
    trainers.close("a")
    with pytest.raises(NotFound):
        trainers.publish("a")()


def test_the_slowest_slice_is_timed_and_nothing_is_left(tmp_path: Path) -> None:
    own = trainers_of(tiny_models.make(tmp_path / "model", "qwen3"))
    assert 0.0 < own.slowest_slice(8, 64) < 60_000.0
    with pytest.raises(NotFound):
        own.settle("warm-up", True)


def test_what_a_trainer_takes_is_known_before_it_is_opened(trainers: MLXTrainers, tmp_path: Path) -> None:
    """By its rank and its targets, or by what was saved of it."""
    whole = trainers.required_bytes(TrainerSpec("x", 8, 8.0), "")
    assert trainers.required_bytes(TrainerSpec("x", 16, 8.0), "") == 2 * whole
    assert 0 < trainers.required_bytes(TrainerSpec("x", 8, 8.0, ("q_proj",)), "") < whole / 3
    trainers.open(TrainerSpec("a", 8, 8.0), "", None)
    (tmp_path / "saved").mkdir()
    trainers.snapshot("a")(str(tmp_path / "saved"))
    assert trainers.required_bytes(TrainerSpec("x", 1, 1.0), str(tmp_path / "saved")) == whole
    with pytest.raises(InvalidRequest):
        trainers.required_bytes(TrainerSpec("x", 0, 1.0), "")


def test_what_the_device_says_is_told_from_what_the_code_says() -> None:
    """Memory that cannot be had is one kind of it. Anything else is raised as it is."""
    for raised, seen in (
        (RuntimeError("[metal::malloc] Attempting to allocate: Insufficient Memory"), OutOfMemory),
        (RuntimeError("cudaMallocAsync failed: out of memory"), OutOfMemory),
        (MemoryError("std::bad_alloc"), OutOfMemory),
        (RuntimeError("an illegal memory access was encountered"), DeviceError),
        (ValueError("shapes"), ValueError),
    ):
        with pytest.raises(seen) as e, device_errors():
            raise raised
        assert type(e.value) is seen
