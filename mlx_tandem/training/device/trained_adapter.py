"""One adapter in training: its float32 arrays, the gradients that have added up, and AdamW's moments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import msgspec
import numpy as np

from mlx_tandem import files
from mlx_tandem.adapters import convert, formats
from mlx_tandem.adapters.formats import AdapterWeights, Array, LinearShape
from mlx_tandem.engine.learning import AdamParams, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.engine.plan import Wait
from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend
from mlx_tandem.training.device.adamw import Moments, ends, flat, parts, update
from mlx_tandem.training.device.copies import Copy
from mlx_tandem.training.device.slices import device_errors, joined, launched
from mlx_tandem.training.device.tree import SCORE_HEAD, Dropout, Pair

HostPairs = dict[str, tuple[Array, Array]]
_T = TypeVar("_T")

TRAINER = "trainer.json"
OPTIMIZER = "optimizer.safetensors"
FORMAT = 1

CHUNK_PARAMETERS = 4 << 20
"""About how many numbers lie end to end. What the optimiser needs for so many is in memory at once."""


class About(msgspec.Struct, frozen=True):
    """The content of `trainer.json`, which says what a checkpoint's arrays belong to."""

    spec: TrainerSpec
    step: int
    format: int = FORMAT


class _State(NamedTuple):
    """The arrays and counts that a step of the optimiser replaces.

    All arrays but those of `served` are evaluated; other threads may read evaluated arrays only.
    """

    flats: list[mx.array]  # the weights of each chunk of pairs, laid end to end: all A, then all B
    pairs: dict[str, Pair]  # views of these
    moments: list[Moments]
    step_count: int
    served: dict[mx.Dtype, dict[str, Pair]]  # what `TrainedAdapter.served` has made of the pairs


class TrainedAdapter:
    """An adapter with its optimiser's state. Belongs to the thread that runs the model."""

    def __init__(self, spec: TrainerSpec, linears: Mapping[str, LinearShape], pairs: dict[str, Pair]):
        """Begin with `pairs`, unscaled, of the linears of the same paths; moments and gradients are zero."""
        self.spec = spec
        self._linears = linears
        self._chunks = _chunks(pairs)
        self._now = _State([], {}, [], 0, {})
        for chunk in self._chunks:
            whole = flat(_arrays(pairs, chunk))
            self._now.flats.append(whole)
            self._now.pairs.update(_pairs(whole, chunk, pairs))
            self._now.moments.append(Moments(mx.zeros(whole.shape), mx.zeros(whole.shape)))
        launched(self._now.pairs, self._now.moments)()
        self._gradients: dict[str, Pair] | None = None
        self._before: _State | None = None  # before the last step, or before the first of several that belong together
        self._more = False  # whether the next step belongs to the last one
        self._masks = 0  # that `dropout` has given since the last step

    @classmethod
    def fresh(cls, spec: TrainerSpec, linears: Mapping[str, LinearShape], hidden_size: int = 0) -> TrainedAdapter:
        """Return one with A uniform in ±1/sqrt(inputs) and B zero: the model is the base until the first step.

        A score head, of `hidden_size` numbers, is zero, and so is every score until then.
        """
        return cls(spec, linears, _fresh(spec, linears, hidden_size))

    @classmethod
    def from_adapter(
        cls, spec: TrainerSpec, linears: Mapping[str, LinearShape], weights: AdapterWeights, hidden_size: int = 0
    ) -> TrainedAdapter:
        """Return one that begins as a loaded adapter, whose scale is taken out of B again.

        Modules that the loaded one lacks get fresh pairs, and so does a score head. Raises ModelError for one that does
        not fit `spec`.
        """
        pairs = _fresh(spec, linears, hidden_size)
        if weights.score_head is not None:
            if not spec.scores:
                raise ModelError("the adapter is a reward model, which cannot learn to generate", param="init_from")
            pairs[SCORE_HEAD] = _head_pair(weights.score_head)
        for path, (a, b) in weights.tensors.items():
            if path not in linears:
                raise ModelError(f"the adapter changes {path[:200]}, which this trainer does not", param="targets")
            if a.shape[-1] > spec.rank:
                raise ModelError(f"the adapter has rank {a.shape[-1]}, the trainer {spec.rank}", param="rank")
            fresh_a, fresh_b = pairs[path]
            wide_b = np.zeros(fresh_b.shape, np.float32)
            wide_b[..., : b.shape[-2], :] = b / np.float32(spec.scale)
            pairs[path] = (mx.concatenate([mx.array(a), fresh_a[..., a.shape[-1] :]], -1), mx.array(wide_b))
        return cls(spec, linears, pairs)

    @classmethod
    def restored(
        cls, spec: TrainerSpec, linears: Mapping[str, LinearShape], saved: AdapterWeights, folder: Path
    ) -> TrainedAdapter:
        """Return what `snapshot` wrote into `folder`; `saved` is its adapter, not scaled. Raises ModelError."""
        chosen = {path: linears[path] for path in linears if path in saved.tensors}
        pairs = {path: (mx.array(saved.tensors[path][0]), mx.array(saved.tensors[path][1])) for path in chosen}
        if spec.scores:
            if saved.score_head is None:
                raise ModelError(f"{folder.name} has no score head, which its trainer has", param="resume")
            pairs[SCORE_HEAD] = _head_pair(saved.score_head)
        trainer = cls(spec, chosen, pairs)
        trainer._restore(folder)
        return trainer

    @property
    def scale(self) -> float:
        """Factor of the adapter's delta."""
        return self.spec.scale

    @property
    def pairs(self) -> dict[str, Pair]:
        """A [inputs, r] and B [r, outputs] by path, unscaled; experts are the first axis where a module has them."""
        return self._now.pairs

    @property
    def step_count(self) -> int:
        """Steps of the optimiser so far."""
        return self._now.step_count

    @property
    def info(self) -> TrainerInfo:
        """The description of this trainer that the engine sends to the front."""
        size = sum(a.size + b.size for a, b in self.pairs.values())
        targets = tuple(sorted({path.rpartition(".")[2] for path in self.pairs if path != SCORE_HEAD}))
        return TrainerInfo(self.spec.name, self.spec.rank, self.spec.alpha, targets, size, self.step_count)

    # --- learning ------------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> dict[str, Pair]:
        """Sums over the passes since the last step, by the pairs that are `served`; a copy, which nobody changes."""
        return dict(self._gradients or {})

    @gradients.setter
    def gradients(self, sums: dict[str, Pair]) -> None:
        self._gradients = sums

    def dropout(self) -> Dropout | None:
        """Return the dropout of the next micro-batch, which depends on the seed, the step and the micro-batches since.

        None: this adapter has none.
        """
        options = self.spec.options
        if not options.dropout:
            return None
        self._masks += 1
        return Dropout(options.dropout, (self.spec.seed, self.step_count, self._masks))

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self._gradients, self._masks = None, 0

    def begin_pass(self) -> None:
        """Keep the last step unless others follow that belong to it: a step back has no room beside a pass."""
        if not self._more:
            self._before = None

    def step(self, adam: AdamParams, more: bool = False) -> Generator[Wait, None, StepDone]:
        """Take one step with the gradients there are, in slices of some chunks each; they are gone then.

        With gradients that are not finite, or none, nothing is changed. With `more` the next step belongs to this one:
        `settle` keeps both or takes both back.
        """
        gradients, self._gradients = self._gradients, None
        if not self._more:
            self._before = None
        self._more = more
        self._masks = 0
        self._now.served.clear()
        if gradients is None:
            return StepDone(self.spec.name, self.step_count, 0.0, True)
        flats: list[mx.array] = []
        sums: list[mx.array] = []
        count = backend.current().learning.step_chunks
        yield from joined(self._flattened(gradients, flats, sums), count)
        with device_errors():
            squares, products, means = (sum(column) for column in zip(*map(_floats, sums), strict=True))
        size = math.sqrt(squares)
        if not math.isfinite(size):
            return StepDone(self.spec.name, self.step_count, size, False)
        share = min(1.0, adam.grad_norm / (size + 1e-6)) if adam.grad_norm else 1.0
        now, after = self._now, _State([], {}, [], self.step_count + 1, {})
        yield from joined(self._moved(flats, share, after, adam), count)
        launched(after.pairs, after.moments)()  # before it counts
        self._before, self._now = self._before or now, after
        agreement = products / math.sqrt(squares * means) if squares * means else None
        return StepDone(self.spec.name, self.step_count, size, True, agreement)

    def _flattened(self, gradients: dict[str, Pair], flats: list[mx.array], sums: list[mx.array]) -> Iterator[Wait]:
        """Append the gradients as the weights are laid out, and the sums of their squares, of their products with
        the mean of earlier gradients, and of the squares of that; empty `gradients`.
        """
        for chunk, known in zip(self._chunks, self._now.moments, strict=True):
            own, n = _arrays(gradients, chunk), len(chunk)
            flats.append(mx.concatenate([flat(own[:n]), flat(own[n:]) * self.scale]))
            sums.append(mx.stack([flats[-1].square().sum(), (flats[-1] * known.m).sum(), known.m.square().sum()]))
            del own
            for path in chunk:
                del gradients[path]
            yield launched(flats[-1], sums[-1])

    def _moved(self, flats: list[mx.array], share: float, after: _State, adam: AdamParams) -> Iterator[Wait]:
        """Fill in `after` from the gradients in `flats` times `share`, and empty `flats`."""
        for chunk, old, known in zip(self._chunks, self._now.flats, self._now.moments, strict=True):
            ratio = self._ratio(chunk, old.size)
            new, moments = update(old, flats.pop(0) * share, known, after.step_count, adam, ratio)
            own = _pairs(new, chunk, self._now.pairs)
            after.flats.append(new)
            after.pairs.update(own)
            after.moments.append(moments)
            yield launched(own, moments)

    def _ratio(self, chunk: Sequence[str], size: int) -> mx.array | float:
        """Return the learning rate of each of a chunk's `size` weights, relative to that of A."""
        if self.spec.options.plus_ratio == 1.0:
            return 1.0
        border = ends(a.size for a, _ in (self.pairs[path] for path in chunk))[-1]
        return mx.where(mx.arange(size) < border, 1.0, self.spec.options.plus_ratio)

    def settle(self, keep: bool) -> None:
        """Keep the last step, or take it back, and all gradients with it."""
        before, self._before, self._more = self._before, None, False
        if not keep:
            self.drop_gradients()
            if before is not None:
                self._now = before

    # --- in and out ----------------------------------------------------------------------------------------------

    def served(self, dtype: mx.Dtype) -> dict[str, Pair]:
        """Return the present weights as a slot has them: B scaled, rounded to `dtype`; a score head as it is.

        They are made at their first use and once, so that passes multiply by exactly what is published.
        """
        known = self._now.served.get(dtype)
        if known is not None:
            return known
        made: dict[str, Pair] = {}
        for chunk, whole in zip(self._chunks, self._now.flats, strict=True):
            like, n = _arrays(self.pairs, chunk), len(chunk)
            border = ends(x.size for x in like[:n])[-1]
            a = parts(whole[:border].astype(dtype), like[:n])
            b = parts((whole[border:] * self.scale).astype(dtype), like[n:])
            made.update(_by_path(chunk, a + b))
        if SCORE_HEAD in made:
            made[SCORE_HEAD] = self.pairs[SCORE_HEAD]
        self._now.served[dtype] = made
        return made

    def publish(self) -> Callable[[], AdapterWeights]:
        """Copy the present weights; the result makes of them what would be read of a snapshot.

        Call the result once, on any thread. It raises ModelError when the weights are not finite.
        """
        copies = [
            _Copies(chunk, self.pairs, [whole]) for chunk, whole in zip(self._chunks, self._now.flats, strict=True)
        ]
        spec, linears = self.spec, self._linears
        return lambda: formats.from_arrays(*_peft([each.read()[0] for each in copies], spec), linears)

    def snapshot(self, optimizer: bool = True) -> Callable[[str], None]:
        """Copy all state; the result writes it into an empty folder: a PEFT adapter, and the optimiser's state with it.

        Call the result once, on any thread. The files are on the drive when it returns. Without `optimizer` it writes
        the adapter alone.
        """
        known = zip(self._chunks, self._now.flats, self._now.moments, strict=True)
        copies = [
            _Copies(chunk, self.pairs, [whole, *(moments if optimizer else ())]) for chunk, whole, moments in known
        ]
        about = About(self.spec, self.step_count)
        return lambda folder: _write(Path(folder), [each.read() for each in copies], about, optimizer)

    def _restore(self, folder: Path) -> None:
        """Take the optimiser's state from a checkpoint. Raises ModelError."""
        from safetensors.numpy import load_file

        try:
            about = msgspec.json.decode((folder / TRAINER).read_bytes(), type=About)
            arrays = load_file(folder / OPTIMIZER)
        except Exception as e:
            raise ModelError(f"{folder.name}: the trainer's state cannot be read: {type(e).__name__}") from e
        if about.format != FORMAT:
            raise ModelError(f"{folder.name}/{TRAINER} has format {about.format}; this version reads {FORMAT}")
        moments = []
        for chunk in self._chunks:
            kinds = []
            for kind in Moments._fields:
                found = [arrays.get(_name(path, side, kind)) for side in "AB" for path in chunk]
                for x, known in zip(found, _arrays(self.pairs, chunk), strict=True):
                    if x is None or x.shape != known.shape or x.dtype != np.float32:
                        raise ModelError(f"{folder.name}/{OPTIMIZER} does not fit this trainer")
                kinds.append(flat([mx.array(x) for x in found if x is not None]))
            moments.append(Moments(*kinds))
        launched(moments)()
        self._now = self._now._replace(moments=moments, step_count=about.step)


class _Copies:
    """Copies of arrays of one chunk, each laid end to end as the chunk's weights are."""

    def __init__(self, paths: Sequence[str], pairs: Mapping[str, Pair], wholes: Sequence[mx.array]):
        """Begin to copy `wholes`, on the device."""
        self._paths = paths
        self._shapes = [x.shape for x in _arrays(pairs, paths)]
        self._copies = [Copy(whole) for whole in wholes]

    def read(self) -> list[HostPairs]:
        """Return each array as pairs by path. Call it once, on any thread."""
        sizes = [math.prod(shape) for shape in self._shapes]
        found = []
        for copy in self._copies:
            pieces = zip(np.split(copy.read(), ends(sizes)[:-1]), sizes, self._shapes, strict=True)
            arrays = [x[:size].reshape(shape) for x, size, shape in pieces]
            found.append(_by_path(self._paths, arrays))
        return found


def _fresh(spec: TrainerSpec, linears: Mapping[str, LinearShape], hidden_size: int) -> dict[str, Pair]:
    """Return pairs of an adapter that changes nothing yet; A depends on the seed only."""
    key = mx.random.key(spec.seed)
    pairs: dict[str, Pair] = {}
    for path, shape in linears.items():
        key, own = mx.random.split(key)
        lead = (shape.experts,) if shape.experts else ()
        bound = shape.inputs**-0.5
        a = mx.random.uniform(-bound, bound, (*lead, shape.inputs, spec.rank), key=own)
        pairs[path] = (a, mx.zeros((*lead, spec.rank, shape.outputs)))
    if spec.scores:
        pairs[SCORE_HEAD] = _head_pair(np.zeros(hidden_size, np.float32))
    return pairs


def _floats(sums: mx.array) -> list[float]:
    return [float(x) for x in np.array(sums)]


def _head_pair(head: Array) -> Pair:
    """Return the pair of a score head [hidden]."""
    return mx.array(head.reshape(-1, 1)), mx.zeros((1, 0))


def _chunks(pairs: Mapping[str, Pair]) -> list[list[str]]:
    """Return the paths in order, in groups whose arrays lie end to end."""
    chunks: list[list[str]] = []
    size = CHUNK_PARAMETERS
    for path, (a, b) in pairs.items():
        if size >= CHUNK_PARAMETERS:
            chunks.append([])
            size = 0
        chunks[-1].append(path)
        size += a.size + b.size
    return chunks


def _arrays(pairs: Mapping[str, Pair], paths: Sequence[str]) -> list[mx.array]:
    """Return the arrays of these paths: all A, then all B."""
    return [pairs[path][side] for side in (0, 1) for path in paths]


def _by_path(paths: Sequence[str], arrays: Sequence[_T]) -> dict[str, tuple[_T, _T]]:
    """Return pairs by path; the inverse of `_arrays`."""
    n = len(paths)
    return dict(zip(paths, zip(arrays[:n], arrays[n:], strict=True), strict=True))


def _pairs(whole: mx.array, paths: Sequence[str], like: Mapping[str, Pair]) -> dict[str, Pair]:
    return _by_path(paths, parts(whole, _arrays(like, paths)))


def _name(path: str, side: str, kind: str) -> str:
    """Return the name of a moment in a checkpoint."""
    return f"{path}.{side}.{kind}"


def _peft(chunks: Sequence[HostPairs], spec: TrainerSpec) -> tuple[dict[str, Any], dict[str, Array]]:
    modules = {path: pair for pairs in chunks for path, pair in pairs.items()}
    head = modules.pop(SCORE_HEAD, None)
    return convert.to_peft(
        modules, spec.rank, spec.alpha, rslora=spec.options.rslora, dropout=spec.options.dropout,
        score_head=None if head is None else head[0],
    )  # fmt: skip


def _write(folder: Path, chunks: Sequence[Sequence[HostPairs]], about: About, optimizer: bool) -> None:
    """Write each chunk's weights, and with `optimizer` its moments, into a folder, durably."""
    from safetensors.numpy import save

    config, tensors = _peft([weights for weights, *_ in chunks], about.spec)
    written = {
        formats.CONFIG: json.dumps(config, indent=2).encode() + b"\n",
        formats.WEIGHTS["peft"]: save(tensors),
    }
    if optimizer:
        moments = {
            _name(path, side, kind): x
            for _, *moments in chunks
            for kind, pairs in zip(Moments._fields, moments, strict=True)
            for path, pair in pairs.items()
            for side, x in zip("AB", pair, strict=True)
        }
        written |= {OPTIMIZER: save(moments), TRAINER: msgspec.json.encode(about)}
    for name, data in written.items():
        files.create(folder / name, data)
    files.sync_folder(folder)
