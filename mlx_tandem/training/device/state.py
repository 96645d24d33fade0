"""One trainer: an adapter's float32 arrays, the gradients that have added up, and AdamW's moments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt
from mlx.optimizers import AdamW

from mlx_tandem import files
from mlx_tandem.adapters import convert, formats
from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.engine.learning import Adam, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.engine.pipeline import Wait
from mlx_tandem.errors import ModelError
from mlx_tandem.training.device.slices import launched

Pair = tuple[mx.array, mx.array]
Arrays = dict[str, npt.NDArray[np.float32]]

TRAINER = "trainer.json"
OPTIMIZER = "optimizer.safetensors"
FORMAT = 1

STEP_PAIRS = 16
"""That the optimiser goes on by in one slice."""


class Moments(msgspec.Struct, frozen=True):
    """`trainer.json`: what a checkpoint's arrays belong to."""

    spec: TrainerSpec
    step: int
    format: int = FORMAT


class Trainer:
    """`pairs[path]` is (A [inputs, r], B [r, outputs]), with experts in front where the module has them; unscaled."""

    def __init__(self, spec: TrainerSpec, linears: Mapping[str, LinearShape], pairs: dict[str, Pair]):
        self.spec = spec
        self.pairs = pairs
        self.step_count = 0
        self._linears = linears
        self._optimizer = _optimizer()
        self._optimizer.init(pairs)
        mx.eval(self._optimizer.state)  # other threads may read what is evaluated, and nothing else
        self._gradients: dict[str, Pair] | None = None
        self._before: tuple[dict[str, Pair], Any, int] | None = None  # the state before the last step

    @classmethod
    def fresh(cls, spec: TrainerSpec, linears: Mapping[str, LinearShape]) -> Trainer:
        """A uniform in ±1/sqrt(inputs), B zero: the model is the base until the first step."""
        key = mx.random.key(spec.seed)
        pairs: dict[str, Pair] = {}
        for path, shape in linears.items():
            key, own = mx.random.split(key)
            lead = (shape.experts,) if shape.experts else ()
            bound = shape.inputs**-0.5
            a = mx.random.uniform(-bound, bound, (*lead, shape.inputs, spec.rank), key=own)
            pairs[path] = (a, mx.zeros((*lead, spec.rank, shape.outputs)))
        mx.eval(pairs)
        return cls(spec, linears, pairs)

    @classmethod
    def from_adapter(cls, spec: TrainerSpec, linears: Mapping[str, LinearShape], weights: AdapterWeights) -> Trainer:
        """Beginning with a loaded adapter, its scale taken out of B again; modules that it has not get fresh pairs."""
        trainer = cls.fresh(spec, linears)
        for path, (a, b) in weights.tensors.items():
            if path not in linears:
                raise ModelError(f"the adapter changes {path[:200]}, which this trainer does not", param="targets")
            if a.shape[-1] > spec.rank:
                raise ModelError(f"the adapter has rank {a.shape[-1]}, the trainer {spec.rank}", param="rank")
            fresh_a, fresh_b = trainer.pairs[path]
            wide_b = np.zeros(fresh_b.shape, np.float32)
            wide_b[..., : b.shape[-2], :] = b / np.float32(trainer.scale)
            trainer.pairs[path] = (mx.concatenate([mx.array(a), fresh_a[..., a.shape[-1] :]], -1), mx.array(wide_b))
        mx.eval(trainer.pairs)
        return trainer

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    @property
    def info(self) -> TrainerInfo:
        size = sum(a.size + b.size for a, b in self.pairs.values())
        targets = tuple(sorted({path.rpartition(".")[2] for path in self.pairs}))
        return TrainerInfo(self.spec.name, self.spec.rank, self.spec.alpha, targets, size, self.step_count)

    # --- learning ------------------------------------------------------------------------------------------------

    def accumulate(self, gradients: Mapping[str, Pair]) -> None:
        if self._gradients is None:
            self._gradients = dict(gradients)
        else:
            for path, (a, b) in gradients.items():
                known = self._gradients.get(path)
                self._gradients[path] = (a, b) if known is None else (known[0] + a, known[1] + b)
        mx.eval(self._gradients)

    def drop_gradients(self) -> None:
        self._gradients = None

    def step(self, adam: Adam) -> Generator[Wait, None, StepDone]:
        """One step with the gradients there are, some pairs at a time. With gradients that are not finite, or none,
        nothing is changed."""
        gradients, self._gradients = self._gradients, None
        self._before = None
        if gradients is None:
            return StepDone(self.spec.name, self.step_count, 0.0, True)
        chunks = [list(gradients)[i : i + STEP_PAIRS] for i in range(0, len(gradients), STEP_PAIRS)]
        squares = []
        for paths in chunks:
            squares.append(sum((g.square().sum() for path in paths for g in gradients[path]), mx.array(0.0)))
            yield launched(squares[-1])
        size = math.sqrt(sum(float(np.array(s)) for s in squares))
        if not math.isfinite(size):
            return StepDone(self.spec.name, self.step_count, size, False)
        share = min(1.0, adam.grad_norm / (size + 1e-6)) if adam.grad_norm else 1.0
        before = (self.pairs, _copied(self._optimizer.state), self.step_count)
        optimizer, state = self._optimizer, self._optimizer.state
        optimizer.learning_rate = adam.learning_rate
        optimizer.betas, optimizer.eps = [adam.beta1, adam.beta2], adam.eps
        optimizer.weight_decay = adam.weight_decay
        state["step"] = state["step"] + 1
        stepped: dict[str, Pair] = {}
        try:
            for paths in chunks:
                for path in paths:
                    a, b = (
                        optimizer.apply_single(g * share, p, moments)
                        for g, p, moments in zip(gradients[path], self.pairs[path], state[path], strict=True)
                    )
                    stepped[path] = (a, b)
                yield launched([stepped[path] for path in paths], [state[path] for path in paths], state["step"])
        except BaseException:  # whoever drops a step half done drops all of it
            optimizer.state = before[1]
            raise
        mx.eval(stepped)  # before it counts
        self.pairs = self.pairs | stepped
        self.step_count += 1
        self._before = before
        return StepDone(self.spec.name, self.step_count, size, True)

    def settle(self, keep: bool) -> None:
        """Keep the last step, or take it back, and all gradients with it."""
        before, self._before = self._before, None
        if not keep:
            self._gradients = None
            if before is not None:
                self.pairs, self._optimizer.state, self.step_count = before

    # --- in and out ----------------------------------------------------------------------------------------------

    def publish(self) -> Callable[[], AdapterWeights]:
        """The present weights, as what `snapshot` writes would be read; to be called on any thread. ModelError there
        when they are not finite."""
        pairs, spec, linears = self.pairs, self.spec, self._linears
        return lambda: formats.from_arrays(*_peft(pairs, spec), linears)

    def snapshot(self) -> Callable[[str], None]:
        """Everything that a trainer needs to go on as if nothing had been; what is returned writes it into an empty
        folder, on any thread: a PEFT folder with the optimiser's state beside it, on the drive when it returns."""
        pairs, about = self.pairs, Moments(self.spec, self.step_count)
        moments = {f"{path}.{side}.{kind}": state[kind] for path, side, state in self._states() for kind in "mv"}
        return lambda folder: _write(Path(folder), pairs, moments, about)

    def restore(self, folder: Path) -> None:
        """The optimiser's state from a checkpoint. Raises ModelError."""
        from safetensors.numpy import load_file

        try:
            moments = msgspec.json.decode((folder / TRAINER).read_bytes(), type=Moments)
            arrays = load_file(folder / OPTIMIZER)
        except Exception as e:
            raise ModelError(f"{folder.name}: the trainer's state cannot be read: {type(e).__name__}") from e
        if moments.format != FORMAT:
            raise ModelError(f"{folder.name}/{TRAINER} has format {moments.format}; this version reads {FORMAT}")
        for path, side, state in self._states():
            for kind in "mv":
                found = arrays.get(f"{path}.{side}.{kind}")
                if found is None or found.shape != state[kind].shape or found.dtype != np.float32:
                    raise ModelError(f"{folder.name}/{OPTIMIZER} does not fit this trainer: {path}")
                state[kind] = mx.array(found)
        self.step_count = moments.step
        self._optimizer.state["step"] = mx.array(moments.step, mx.uint64)
        mx.eval(self._optimizer.state)

    def _states(self) -> list[tuple[str, str, dict[str, mx.array]]]:
        """(path, "A" or "B", moments)."""
        tree = self._optimizer.state
        return [(path, side, tree[path][i]) for path in self.pairs for i, side in enumerate("AB")]


def _peft(pairs: Mapping[str, Pair], spec: TrainerSpec) -> tuple[dict[str, Any], Arrays]:
    arrays = {path: (np.array(a), np.array(b)) for path, (a, b) in pairs.items()}
    return convert.to_peft(arrays, spec.rank, spec.alpha)


def _write(folder: Path, pairs: Mapping[str, Pair], moments: Mapping[str, mx.array], about: Moments) -> None:
    from safetensors.numpy import save

    config, tensors = _peft(pairs, about.spec)
    for name, data in (
        (formats.CONFIG, json.dumps(config, indent=2).encode() + b"\n"),
        (formats.WEIGHTS["peft"], save(tensors)),
        (OPTIMIZER, save({name: np.array(m) for name, m in moments.items()})),
        (TRAINER, msgspec.json.encode(about)),
    ):
        files.create(folder / name, data)
    files.sync_folder(folder)


def _optimizer() -> Any:
    return AdamW(learning_rate=0.0, bias_correction=True)


def _copied(tree: Any) -> Any:
    """The containers anew; the arrays, which nobody changes, are the same."""
    if isinstance(tree, dict):
        return {k: _copied(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_copied(v) for v in tree)
    return tree
