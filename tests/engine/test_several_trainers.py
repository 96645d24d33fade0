"""Several trainers under one host: passes in turns, and the failure of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_tandem.engine import messages as m
from mlx_tandem.engine.learning import AdamParams, Batch, LossConfig, TrainerSpec
from mlx_tandem.engine.plan import DeviceError, Slice
from mlx_tandem.training.device.backward import MicroBatch
from mlx_tandem.training.device.trainers import MLXTrainers
from tests import tiny_models
from tests.engine.hosts import Driver
from tests.engine.learning import some_data, strengthen, trainers_of

ADAM = AdamParams(1e-2, grad_norm=1.0, weight_decay=0.01)


def bits_of(trainers: MLXTrainers, name: str) -> dict[str, list[bytes]]:
    """The gradients of a trainer to the bit."""
    return {path: [np.array(x).tobytes() for x in pair] for path, pair in trainers._trainers[name].gradients.items()}


def hosted(folder: Path, *names: str) -> tuple[MLXTrainers, Driver]:
    trainers = trainers_of(folder, micro_batch_tokens=48)
    driver = Driver(trainers, budget=1 << 30).open()
    for i, name in enumerate(names):
        driver.host.submit(m.OpenTrainer(100 + i, TrainerSpec(name, 4, 8.0, seed=5 + i)))
    driver.run()
    for name in names:
        strengthen(trainers, name)
    return trainers, driver


def a_pass(call: int, name: str, seed: int) -> m.ForwardBackward:
    return m.ForwardBackward(call, (Batch(name, tuple(some_data(seed)), LossConfig("ppo", kl_coef=0.1)),))


@pytest.mark.parametrize("error", [RuntimeError("broken"), ValueError("broken"), DeviceError("broken")])
@pytest.mark.parametrize("after", [1, 9, 30])
def test_gradients_of_another_trainer_survive_a_failure_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, after: int
) -> None:
    """Those that were there before, and those of a pass that was under way in turns with the one that fails."""
    folder = tiny_models.make(tmp_path / "model", "qwen3")
    wanted: dict[str, list[bytes]] = {}
    for fails in (False, True):
        trainers, driver = hosted(folder, "a", "b")
        driver.host.submit(a_pass(1, "b", 1))
        driver.run()
        driver.host.submit(a_pass(2, "a", 2))
        driver.host.submit(a_pass(3, "b", 3))
        slices = 0
        while not any(isinstance(x, m.CallFailed) for x in driver.answers) and driver.host.has_work:
            slice_ = driver.host.next_slice()
            if fails and slice_ == Slice(("a",), "forward_backward", after):
                with monkeypatch.context() as patch:
                    patch.setattr(MicroBatch, "_run", _raising(error))
                    patch.setattr(MicroBatch, "_head", _raising(error))
                    patch.setattr(MicroBatch, "__init__", _raising(error))
                    driver.turn()
            else:
                driver.turn()
            slices += 1
        driver.run()
        assert {x.call for x in driver.answers if isinstance(x, m.CallFailed)} == ({2} if fails else set())
        if fails:
            assert bits_of(trainers, "b") == wanted and not bits_of(trainers, "a")
        wanted = bits_of(trainers, "b")
    assert wanted


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_passes_in_turns_find_what_each_finds_alone(tmp_path: Path) -> None:
    """Two trainers' micro-batches in turns: losses, logprobs, gradients and weights to the bit."""
    folder = tiny_models.make(tmp_path / "model", "qwen3")
    found = []
    for together in (True, False):
        trainers, driver = hosted(folder, "a", "b")
        for call, (name, seed) in enumerate([("a", 1), ("b", 2), ("a", 3), ("b", 4)]):
            driver.host.submit(a_pass(call, name, seed))
            if not together:
                driver.run()
        driver.run()
        order = [x.trainers for x in driver.slices if x.kind == "forward_backward"]
        switches = sum(one != other for one, other in itertools.pairwise(order))
        assert switches > 4 if together else switches == 3
        gradients = [bits_of(trainers, name) for name in "ab"]
        for call, name in enumerate("ab", 10):
            driver.host.submit(m.OptimStep(call, name, ADAM))
        driver.run()
        results = {x.call: x.results for x in driver.answers if isinstance(x, m.PassDone)}
        weights = [
            {path: [np.array(x).tobytes() for x in pair] for path, pair in trainers._trainers[n].pairs.items()}
            for n in "ab"
        ]
        found.append((results, gradients, weights))
    assert found[0] == found[1]
