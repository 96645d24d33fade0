"""The trainers of one model on MLX: everything that is asked of them, as slices of device work."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_tandem import limits
from mlx_tandem.adapters import formats
from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.engine.learning import (
    WHOLE,
    AdamParams,
    Batch,
    BatchResult,
    Datum,
    LossConfig,
    Part,
    StepDone,
    TrainerInfo,
    TrainerSpec,
)
from mlx_tandem.engine.plan import Wait
from mlx_tandem.engine.trainers import Pause
from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.model import footprint
from mlx_tandem.model.cache.states import arranged, keeps_state, leaves
from mlx_tandem.model.deterministic import Deterministic
from mlx_tandem.model.inputs import Inputs, receive, specs
from mlx_tandem.model.loader import first_line
from mlx_tandem.training.device import completions, losses, pages, rows
from mlx_tandem.training.device.backward import MicroBatch, Positions, Weights
from mlx_tandem.training.device.cutting import PLAIN, Cutter, Cutting, evenly, items_of
from mlx_tandem.training.device.layerwise import LayerwiseForward
from mlx_tandem.training.device.pages import PageInputs
from mlx_tandem.training.device.rows import Rows
from mlx_tandem.training.device.scores import ScoredMicroBatch
from mlx_tandem.training.device.slices import Slices, device_errors, dispatch, finish, launched
from mlx_tandem.training.device.trained_adapter import TRAINER, About, TrainedAdapter
from mlx_tandem.training.device.tree import Dropout, Pair, Tree

Passes = Generator[Wait, None, tuple[BatchResult, ...]]

_FEED_FORWARD = re.compile(r"(^|\.)(\w*mlp\w*|\w*ffn\w*|feed_?forward\w*|\w*moe\w*|\w*experts?\w*)\.")
"""Pattern of the paths of linears in feed-forward blocks, with the names that model families have for these."""


class MLXTrainers:
    """All trainers of one model; the TrainerBackend that `engine/trainers.py` asks."""

    def __init__(
        self,
        model: nn.Module,
        dtype: mx.Dtype,
        *,
        vocab_size: int,
        micro_batch_tokens: int,
        most_tokens: int,
        cutting: Cutting = PLAIN,
        prepare: Callable[[AdapterWeights, dict[str, Pair]], None] = lambda weights, served: None,
        exact: Deterministic | None = None,
    ):
        """Create a back end without trainers.

        Args:
            model: A clone of the served model, which nobody else calls.
            dtype: The type of served adapters and their products.
            vocab_size: Number of token ids.
            micro_batch_tokens: Tokens of one forward and backward, where a pass does not say otherwise.
            most_tokens: Tokens of the longest sequence.
            cutting: The way in which passes are cut.
            prepare: Called on another thread with weights that are about to be published, and the same as a slot has
                them.
            exact: The arithmetic of the model under `--deterministic`.
        """
        self._tree = Tree(model, dtype, exact)
        self._layerwise = LayerwiseForward(self._tree.model, self._tree.layers, exact)
        self._vocab_size = vocab_size
        self.micro_batch_tokens = micro_batch_tokens
        self._most_tokens = most_tokens
        self._cutting = cutting
        caches = list(leaves(make_prompt_cache(self._tree.model)))
        self._windows = [getattr(cache, "max_size", None) for cache in caches]
        self._has_states = any(keeps_state(cache) for cache in caches)
        self._problem = self._find_problem()
        self._prepare = prepare
        self._inputs = Inputs()
        self._trainers: dict[str, TrainedAdapter] = {}

    # --- trainers ------------------------------------------------------------------------------------------------

    def required_bytes(self, spec: TrainerSpec, folder: str) -> int:
        """Return how many bytes a trainer of `spec`, or the one that was saved in `folder`, takes while it is open.

        Raises InvalidRequest for one that cannot be.
        """
        if folder:
            spec = _saved_spec(Path(folder), spec)
        _check_spec(spec)
        return footprint.trainer_bytes(self._chosen(spec), spec.rank)

    def open(self, spec: TrainerSpec, folder: str, weights: AdapterWeights | None) -> TrainerInfo:
        """Make a trainer of `spec.name`, in place of one of that name. Raises InvalidRequest, ModelError, DeviceError.

        It has the state that was saved in `folder`, else the weights given, else fresh ones.
        """
        _check_spec(spec)
        if self._problem:
            raise InvalidRequest(self._problem, param="model")
        linears = self._chosen(spec)
        if spec.scores:
            self._check_scores(linears)
        if weights is not None and not spec.targets and not spec.parts and not spec.scores:
            linears |= {path: shape for path, shape in self._tree.head.items() if path in weights.tensors}
        with device_errors():
            if folder:
                trainer = self._restored(spec, self._tree.linears | self._tree.head, Path(folder))
            else:
                trainer = (
                    TrainedAdapter.from_adapter(spec, linears, weights, self._hidden_size)
                    if weights
                    else TrainedAdapter.fresh(spec, linears, self._hidden_size)
                )
        self._trainers[spec.name] = trainer
        return trainer.info

    @property
    def _hidden_size(self) -> int:
        """Numbers of the hidden states that the output head reads; 0 for a family without a known one."""
        return next((shape.inputs for shape in self._tree.head.values()), 0)

    def _check_scores(self, linears: Mapping[str, LinearShape]) -> None:
        """Raise InvalidRequest unless a reward model may adapt these linears."""
        if not self._tree.head:
            raise InvalidRequest(
                "this model's family has no known output head, so it has no reward models", param="scores"
            )
        if linears.keys() & self._tree.head.keys():
            raise InvalidRequest("a reward model does not use the output head, so it cannot adapt it", param="targets")

    def _restored(self, spec: TrainerSpec, linears: dict[str, LinearShape], folder: Path) -> TrainedAdapter:
        saved = formats.read(
            folder,
            linears,
            max_rank=limits.MAX_LORA_RANK,
            base_layers=len(self._tree.layers),
            scaled=False,
            hidden_size=self._hidden_size,
        )
        if saved.info.invocation:
            raise InvalidRequest(
                f"{folder} has alora_invocation_tokens: an activated LoRA cannot be trained", param="resume"
            )
        return TrainedAdapter.restored(_saved_spec(folder, spec), linears, saved, folder)

    def close(self, name: str) -> None:
        """Forget a trainer and free its memory. Raises NotFound."""
        self._get(name)
        del self._trainers[name]

    def _chosen(self, spec: TrainerSpec) -> dict[str, LinearShape]:
        """Return the linears that a trainer adapts, by path: those of its parts, else those that its targets name, else
        all but the output head.

        Raises InvalidRequest for a name that the model has not.
        """
        if spec.parts:
            return self._of_parts(spec.parts)
        targets = spec.targets
        if not targets:
            return dict(self._tree.linears)
        chosen = {
            path: shape
            for path, shape in (self._tree.linears | self._tree.head).items()
            if any(path == target or path.endswith("." + target) for target in targets)
        }
        for target in targets:
            if not any(path == target or path.endswith("." + target) for path in chosen):
                known = sorted({path.rpartition(".")[2] for path in self._tree.linears | self._tree.head})
                raise InvalidRequest(
                    f"the model has no linear layer {target[:80]!r}; it has {', '.join(known)}", param="targets"
                )
        return chosen

    def _of_parts(self, parts: Sequence[Part]) -> dict[str, LinearShape]:
        """Return the linears of these parts of the model, by path. Raises InvalidRequest for a part without any."""
        of: dict[Part, dict[str, LinearShape]] = {"attention": {}, "mlp": {}, "head": dict(self._tree.head)}
        for path, shape in self._tree.linears.items():
            of["mlp" if _FEED_FORWARD.search(path) else "attention"][path] = shape
        for part in parts:
            if not of[part]:
                raise InvalidRequest(
                    f"this model has no linear layers of its {part} that can be adapted", param="parts"
                )
        return {path: shape for part in parts for path, shape in of[part].items()}

    def _get(self, name: str) -> TrainedAdapter:
        trainer = self._trainers.get(name)
        if trainer is None:
            raise NotFound(f"there is no trainer {name[:80]!r}", param="trainer", code="trainer_not_found")
        return trainer

    def step(self, name: str, adam: AdamParams, more: bool = False) -> Generator[Wait, None, StepDone]:
        """Take one step of the optimiser, in slices. Raises NotFound, DeviceError.

        With `more` the step is kept or taken back together with the next one.
        """
        return self._get(name).step(adam, more)

    def settle(self, name: str, keep: bool) -> None:
        """Keep the last step of a trainer, or take it back with all gradients. Raises NotFound."""
        self._get(name).settle(keep)

    def publish(self, name: str) -> Callable[[], AdapterWeights]:
        """Copy the present weights and return what makes an adapter of them, on any thread. Raises NotFound."""
        trainer, prepare = self._get(name), self._prepare
        with device_errors():
            make, served = trainer.publish(), trainer.served(self._tree.dtype)
            dispatch(served)

        def published() -> AdapterWeights:
            weights = make()
            prepare(weights, served)
            return weights

        return published

    def snapshot(self, name: str, optimizer: bool = True) -> Callable[[str], None]:
        """Copy the present state, or without `optimizer` only the adapter, and return what writes it into an empty
        folder, on any thread. Raises NotFound.
        """
        with device_errors():
            return self._get(name).snapshot(optimizer)

    def drop_gradients(self, name: str) -> None:
        """Forget the gradients of a trainer, if there is one of that name."""
        if name in self._trainers:
            self._trainers[name].drop_gradients()

    def warm_up(self, rank: int) -> None:
        """Run each kind of work once, with a trainer of this rank that is dropped.

        On CUDA kernels compile at their first use. In the first pass that would take half a minute in which nobody gets
        a token.
        """
        with self._temporary(rank) as name:
            data = (Datum((0,) * 4, 2, (1.0, -1.0), (0.0, 0.0)), Datum((0,) * 4, 2, (1.0, -1.0), (0.0, 0.0), 0.5))
            batch = Batch(name, data, LossConfig(kl_coef=0.1))
            for forward_only in (False, True):
                finish(self.run([batch], forward_only, len(data[0].tokens)))
            finish(self.step(name, AdamParams(0.0, grad_norm=1.0)))

    def slowest_slice(self, rank: int, tokens: int) -> float:
        """Return the milliseconds of the slowest slice of a pass over one sequence of `tokens` tokens.

        The pass has a trainer of this rank, which is dropped. The device must have nothing else to do.
        """
        with self._temporary(rank) as name:
            ones = (1.0,) * (tokens - 1)
            batch = Batch(name, (Datum((0,) * tokens, 1, ones, ones),), LossConfig("cross_entropy"))
            finish(self.run([batch], False, tokens))  # compiles
            slices, times = self.run([batch], False, tokens), [0.0]
            started = time.perf_counter()
            for wait in slices:
                wait()
                times.append((time.perf_counter() - started) * 1e3)
                started = time.perf_counter()
            return max(times)

    @contextmanager
    def _temporary(self, rank: int) -> Iterator[str]:
        """Yield the name of a fresh trainer that is gone after the block."""
        name = "warm-up"
        self.open(TrainerSpec(name, rank, float(rank)), "", None)
        try:
            yield name
        finally:
            self.close(name)

    # --- passes --------------------------------------------------------------------------------------------------

    def run(self, batches: Sequence[Batch], forward_only: bool, micro_batch_tokens: int) -> Passes:
        """Run a pass over all batches, in slices, with a Pause between two micro-batches.

        Gradients reach the trainers when all of it is done. Raises NotFound and InvalidRequest at once, DeviceError
        from a slice.
        """
        batches = tuple(batches)
        if len({batch.loss.kind == "score" for batch in batches}) > 1:
            raise InvalidRequest("the loss score needs a pass of its own", param="batches")
        for b, batch in enumerate(batches):
            _check_loss(batch.loss, self._get(batch.trainer).spec, f"batches[{b}].loss")
            for d, datum in enumerate(batch.data):
                self._check(datum, batch, f"batches[{b}].data[{d}]")
        if len({batch.trainer for batch in batches}) != len(batches):
            raise InvalidRequest("a trainer has one batch in a pass", param="batches")
        if not forward_only:
            for batch in batches:
                self._get(batch.trainer).begin_pass()
        return self._run(batches, forward_only, micro_batch_tokens or self.micro_batch_tokens)

    def _check(self, datum: Datum, batch: Batch, where: str) -> None:
        """Raise InvalidRequest for a datum that cannot be trained on; `where` names it."""
        n, p = len(datum.tokens), datum.prompt_length
        if not 1 <= p < n <= self._most_tokens:
            raise InvalidRequest(
                f"{where} has {n} tokens, {p} of them prompt; 1 and 1 are needed, {self._most_tokens} fit", param=where
            )
        limits.check_token_ids(datum.tokens, self._vocab_size, f"{where}.tokens")
        limits.check_token_ids(datum.targets, self._vocab_size, f"{where}.targets")
        count = len(datum.predicted)
        if count % (n - p):
            raise InvalidRequest(f"{where}.targets has {count} entries for {n - p} positions", param=where)
        needs = batch.loss.kind not in ("cross_entropy", "score")
        for name in ("weights", "logprobs", "anchor", "reference"):
            values = getattr(datum, name)
            if values is None:
                continue
            must = name == "weights" or (name == "logprobs" and needs)
            if len(values) != count and (must or values):
                raise InvalidRequest(f"{where}.{name} has {len(values)} entries for {count} tokens", param=where)
            if not np.isfinite(np.array(values, np.float32)).all():
                raise InvalidRequest(f"{where}.{name} holds what is not finite", param=where)
        if datum.mask and len(datum.mask) != count:
            raise InvalidRequest(f"{where}.mask has {len(datum.mask)} entries for {count} tokens", param=where)
        if not 1e-3 <= datum.temperature <= 100.0:
            raise InvalidRequest(f"{where}.temperature must be 0.001 to 100", param=where)
        cut = datum.truncation
        if not (0.0 < cut.top_p <= 1.0 and cut.top_k >= 0 and 0.0 <= cut.min_p <= 1.0):
            raise InvalidRequest(f"{where}.truncation is out of range", param=where)

    def _run(self, batches: tuple[Batch, ...], forward_only: bool, tokens: int) -> Passes:
        shares = [losses.shares([d.trained for d in b.data], b.loss) for b in batches]
        served = [self._get(b.trainer).served(self._tree.dtype) for b in batches]
        # Copies: nothing counts before all of it is done.
        sums = [{} if forward_only else self._get(b.trainer).gradients for b in batches]
        parts: list[completions.Part] = []
        found: list[mx.array] = []
        done, whole_pass = 0, sum(len(b.data) for b in batches)
        for micro in self._cut(batches, tokens):
            # The first is empty, since what the host did so far took as long as a slice.
            yield Pause(done / whole_pass) if done else launched()
            done += len(micro.items)
            own = completions.split(micro.items, shares)
            parts += own
            drop = [None if forward_only else self._get(b.trainer).dropout() for b in batches]
            adapters = _adapters(own, micro.counts, served, sums, drop)
            yield from self._micro_batch(batches, micro, own, adapters, forward_only, found)
        # Everything is read as one array: for each array that is read the host waits for the device.
        whole = mx.concatenate(found) if found else mx.zeros((0,))
        yield launched(whole)
        with device_errors():
            launched(sums)()
            read = np.array(whole)
        for batch, gradients in zip(batches, sums, strict=True):
            if gradients:
                self._get(batch.trainer).gradients = gradients
        return completions.results(batches, parts, read)

    def _cut(self, batches: Sequence[Batch], tokens: int) -> Iterator[Rows]:
        """Yield the micro-batches of a pass."""
        mixed = not self._tree.has_experts
        items = items_of(batches)
        # With dropout equal tokens are not computed alike.
        # A page reads the keys of the pages before it, and has no state to go on from.
        shares = self._cutting.mask_axes and not self._has_states
        # Scores are read at the tokens themselves, and places in pages are those before them.
        kinds = [self._get(b.trainer).spec for b in batches]
        alike = shares and not any(spec.options.dropout or spec.scores for spec in kinds)
        if alike and (width := pages.width_for(items)):
            for part in evenly(lambda most: pages.filled_up(items, width, most, mixed), tokens):
                yield rows.of_pages(part, pages.chained(part, width))
        else:
            cutter = Cutter(tokens, mixed, self._cutting.few_shapes, self._most_tokens)
            for part in cutter.cut(batches):
                yield rows.of_sequences(part, cutter.shape(part))

    def _find_problem(self) -> str:
        """Return why the model cannot be trained on; empty if it can."""
        if self._has_states:
            self._tree.model.train()  # the layers' own kernels have no gradient
        try:
            entry, layers = self._layerwise.enter(mx.zeros((1, 2), mx.int32))
            for layer in layers:
                entry = layer(entry)
            if not isinstance(entry, mx.array) or entry.ndim != 3:
                raise ValueError("a layer hands on more than states")
            self._layerwise.leave(entry[0])
        except Exception as e:
            return f"this model cannot be trained on: {first_line(e)}"
        return ""

    def _fits(self, tokens: int) -> bool:
        """Return whether the activations of all layers for so many tokens are few enough to be kept."""
        shapes = self._tree.linears
        size = footprint.activation_bytes(shapes, len(self._tree.layers), tokens, self._tree.dtype.size)
        return size <= self._cutting.kept_bytes

    def _micro_batch(
        self,
        batches: Sequence[Batch],
        given: Rows,
        own: Sequence[completions.Part],
        adapters: Sequence[Weights],
        forward_only: bool,
        found: list[mx.array],
    ) -> Slices:
        """Run one micro-batch, and append what it found of each of its parts to `found`."""
        items = given.items
        numbers = [
            *given.numbers,
            *rows.drawn(items, self._vocab_size),
            *(n for part in own for n in part.numbers),
        ]
        sent = self._inputs.send(numbers)
        received = receive(sent.arrays, specs(numbers))
        tokens, at, *tables = received[: len(given.numbers)]
        target, temperature, truncation, *rest = received[len(given.numbers) :]
        warm = any(item.datum.temperature != 1.0 for item in items)
        cut = any(item.datum.truncation != WHOLE for item in items)
        scores = batches[own[0].batch].loss.kind == "score"
        at = at + 1 if scores else at
        where = Positions(at, target, temperature if warm else None, truncation if cut else None)
        caches = None
        if tables:
            pages = PageInputs(tables, self._cutting.mask_axes).caches(self._windows)
            caches = arranged(self._tree.model, pages, ())
        kind = ScoredMicroBatch if scores else MicroBatch
        micro = kind(self._tree, self._layerwise, tokens, where, adapters, self._cutting.forward_layers, caches)
        with_base = any(
            batches[part.batch].loss.kl_coef and not all(item.datum.reference for item in part.items) for part in own
        )
        made: list[mx.array] = []

        def loss() -> list[mx.array]:
            """Return the gradients of the loss by the logprobs, and keep what is answered of each part."""
            left, each = rest, []
            for part in own:
                arrays, left = left[: len(part.numbers)], left[len(part.numbers) :]
                values, gradients = completions.loss(micro, part, arrays, batches[part.batch].loss, cut)
                made.append(values)
                each.append(gradients)
            return [mx.concatenate(list(kind)) for kind in zip(*each, strict=True)]

        if not forward_only and micro.trains_layers and self._fits(tokens.size):
            yield from micro.at_once(loss, base=with_base)
            yield launched(made)
        else:
            yield from micro.forward(backward=not forward_only, base=with_base)
            cotangents = loss()
            # They are computed now, so that the arrays that they are made from need not be kept.
            if forward_only:
                yield launched(made)
            else:
                dispatch(made)
                yield from micro.backward(*cotangents)
        found += made
        self._inputs.done(sent)  # the first of several slices has copied it


def _adapters(
    own: Sequence[completions.Part],
    counts: Sequence[int],
    served: Sequence[dict[str, Pair]],
    sums: Sequence[dict[str, Pair]],
    drop: Sequence[Dropout | None],
) -> list[Weights]:
    """Return which rows of a micro-batch go through which trainer's adapter. `counts`: rows of each part."""
    adapters, start = [], 0
    for part, count in zip(own, counts, strict=True):
        dropped = drop[part.batch]
        adapters.append(Weights(start, start + count, served[part.batch], sums[part.batch], part.span, dropped))
        start += count
    return adapters


def _check_spec(spec: TrainerSpec) -> None:
    """Raise InvalidRequest for a rank or a scale that no trainer has."""
    if not 1 <= spec.rank <= limits.MAX_LORA_RANK:
        raise InvalidRequest(f"rank must be 1 to {limits.MAX_LORA_RANK}", param="rank")
    if not 0 < spec.alpha <= limits.MAX_LORA_ALPHA:
        raise InvalidRequest(f"alpha must be over 0 and at most {limits.MAX_LORA_ALPHA:g}", param="alpha")
    limits.check("plus_ratio", spec.options.plus_ratio)
    limits.check("dropout", spec.options.dropout)


def _check_loss(loss: LossConfig, spec: TrainerSpec, where: str) -> None:
    """Raise InvalidRequest for a loss that a trainer does not have; `where` names it."""
    if spec.scores != (loss.kind == "score"):
        raise InvalidRequest("a reward model learns by the loss score, and other trainers by the others", param=where)
    if spec.scores and loss.kl_coef:
        raise InvalidRequest("scores have no divergence, so kl_coef must be 0", param=f"{where}.kl_coef")


def _saved_spec(folder: Path, asked: TrainerSpec) -> TrainerSpec:
    """Return the spec of a checkpoint's trainer, under the name that was asked for. Raises InvalidRequest."""
    try:
        saved = msgspec.json.decode((folder / TRAINER).read_bytes(), type=About).spec
    except (OSError, msgspec.MsgspecError) as e:
        raise InvalidRequest(f"{folder.name} is not a checkpoint: {TRAINER} cannot be read", param="folder") from e
    return msgspec.structs.replace(saved, name=asked.name)
