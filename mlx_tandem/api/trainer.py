"""`Trainer`: a LoRA adapter that is trained on the model that the engine serves."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import structs

from mlx_tandem import files, limits
from mlx_tandem.api.data import Data, ServedCodec, check_data, check_loss
from mlx_tandem.engine.learning import (
    AdamParams,
    Batch,
    BatchResult,
    LoraOptions,
    LossConfig,
    LossKind,
    StepDone,
    TrainerInfo,
    TrainerSpec,
)
from mlx_tandem.errors import Conflict, InvalidRequest, NotFound
from mlx_tandem.generation.front import Front

T = TypeVar("T")


class Call(Protocol):
    """A function that runs work on the front's loop and returns its result."""

    def __call__(self, work: Callable[[], Coroutine[Any, Any, T]], /) -> T:
        """Have the loop make and run the coroutine of `work`, and return its result."""
        ...


OpenTrainers = dict[str, int]
"""The number of engine restarts at the opening of each open trainer, by its name.

An engine that was restarted after that no longer has the trainer.
"""

RANK = 16
"""Rank of a new adapter unless the caller gives one."""

KEPT = 3
"""Number of the last published versions of a trainer that can be asked for."""


class Trainer:
    """An adapter in training, which `Engine.trainer` opens. Requests run meanwhile, and `publish` serves the result.

    >>> trainer = engine.trainer("mine", rank=8)
    >>> for epoch in range(3):
    ...     trainer.forward_backward([{"prompt": "Sort down: 3 9 1", "completion": " 9 3 1"}]).loss
    ...     trainer.step(learning_rate=1e-3)
    >>> trainer.publish()
    'mine@1'

    An example is a mapping or an `engine.learning.Datum`. A mapping has

    - `messages`: a conversation, in which the assistant's answers are taught;
    - or `prompt` and `completion`: texts, or lists of token ids, which are used as they are;
    - or `text`, all of which is taught.

    It may also have `weights` (or `advantages`): a number, or one for each token of the completion; `logprobs` of the
    completion's tokens under the distribution that they were sampled from, which all losses but cross_entropy need; and
    the `temperature` at which they were sampled.
    """

    def __init__(self, call: Call, front: Front, opened: OpenTrainers, info: TrainerInfo):
        self._call = call
        self._front = front
        self._opened = opened
        self.info = info
        """The trainer's state when it was opened."""

    @property
    def name(self) -> str:
        """The name of the trainer and of the versions that it publishes."""
        return self.info.name

    def forward_backward(
        self, data: Data, loss: LossKind | LossConfig = "cross_entropy", **switches: Any
    ) -> BatchResult:
        """Add the gradients of `data` to those that `step` will use. Return the loss and the logprobs before the step.

        `switches` are fields of `LossConfig`. By default the losses of tokens are summed.
        """
        return self._call(lambda: run_pass(self._front, {self: data}, loss, switches, forward_only=False))[self]

    def forward(self, data: Data, loss: LossKind | LossConfig = "cross_entropy", **switches: Any) -> BatchResult:
        """Return the loss and the logprobs of `data` under the present weights, without computing gradients."""
        return self._call(lambda: run_pass(self._front, {self: data}, loss, switches, forward_only=True))[self]

    def step(
        self,
        learning_rate: float,
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_norm: float = 0.0,
    ) -> StepDone:
        """Take one AdamW step with the gradients since the last step. A `grad_norm` over 0 clips their norm to it."""
        numbers = {
            "learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps,
            "weight_decay": weight_decay, "grad_norm": grad_norm,
        }  # fmt: skip
        adam = AdamParams(**{name: float(limits.check(name, value)) for name, value in numbers.items()})
        return self._call(lambda: self._front.client.step_trainer(self.name, adam))

    def undo(self) -> None:
        """Undo the last step if no pass with gradients has begun since then, and drop all gradients."""
        self._call(lambda: self._front.client.settle_trainer(self.name, keep=False))

    def publish(self) -> str:
        """Serve the present weights as a new version of the trainer's name, and return its label, name@version.

        Running requests keep their versions. The last KEPT published versions can be asked for by their labels; older
        ones are forgotten unless a folder holds them.
        """
        return self._call(self._publish)

    async def _publish(self) -> str:
        info = await self._front.client.publish_trainer(self.name)
        models = self._front.models
        ref = models.made(self.name, None, info)
        for old in models.registry.versions(self.name)[:-KEPT]:
            if old.source is None and old.ref != ref:
                await models.retire(old.ref)
        return ref.label

    def save(self, folder: str | Path) -> None:
        """Write a PEFT folder with the optimiser's state, from which `Engine.trainer(resume=folder)` continues.

        A failure leaves no folder behind. Raises Conflict when the folder exists and is not empty, and InvalidRequest
        when it cannot be written.
        """
        target = Path(os.path.abspath(folder))
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise Conflict(f"{target} exists and is not an empty folder", param="folder")
        scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            files.remove_tree(scratch)
            files.make_folder(scratch)
            try:
                self._call(lambda: self._front.client.save_trainer(self.name, str(scratch)))
                files.DISK.rename(scratch, target)
            finally:
                files.remove_tree(scratch)
            files.sync_folder(target.parent)
        except OSError as e:
            raise InvalidRequest(f"{target} cannot be written: {e.strerror}", param="folder") from e

    def close(self) -> None:
        """Free the trainer's memory. Published versions stay, and the name may be opened again."""
        self._call(self._close)

    async def _close(self) -> None:
        self._opened.pop(self.name, None)
        await self._front.client.close_trainer(self.name)

    def __repr__(self) -> str:
        return f"<Trainer {self.name}: rank {self.info.rank}, {self.info.parameters:,} parameters>"


async def run_pass(
    front: Front,
    work: Mapping[Trainer, Data],
    loss: LossKind | LossConfig,
    switches: Mapping[str, Any],
    *,
    forward_only: bool,
) -> dict[Trainer, BatchResult]:
    """Run one pass for several trainers and return the result of each."""
    if not work:
        return {}
    config = check_loss(loss, switches)
    codec = ServedCodec.of(front)

    def batches() -> list[Batch]:
        return [Batch(trainer.name, check_data(data, codec, config), config) for trainer, data in work.items()]

    made = await asyncio.to_thread(batches)  # Streams must not wait for the tokenising of long texts.
    results = await front.client.run_pass(made, forward_only=forward_only)
    return dict(zip(work, results, strict=True))


async def open_trainer(
    call: Call,
    front: Front,
    opened: OpenTrainers,
    name: str,
    *,
    rank: int | None,
    alpha: float | None,
    targets: Sequence[str],
    seed: int,
    options: LoraOptions,
    scores: bool,
    init_from: str | None,
    resume: str | Path | None,
) -> Trainer:
    """Open a trainer as `Engine.trainer` describes, and add its name to `opened`."""
    if name not in front.models.registry:
        front.models.rules.check_free(name)
    limits.check("trainer_seed", seed, "seed")
    if isinstance(targets, str):
        raise InvalidRequest("targets must be a list of names", param="targets", code="invalid_type")
    if opened.get(name) == front.client.epoch:
        raise Conflict(f"a trainer {name!r} is open; close it first, or choose another name", param="name")
    opened[name] = front.client.epoch
    try:
        if resume is not None:
            spec = TrainerSpec(name, 1, 1.0, seed=seed)  # The folder has the real rank and alpha.
            other = {"options": None if options == LoraOptions() else options, "scores": scores or None}
            info = await _resumed(
                front, spec, resume, rank=rank, alpha=alpha, targets=targets, init_from=init_from, **other
            )
        else:
            spec = TrainerSpec(name, 1, 1.0, tuple(targets), seed, options, scores=scores)
            info = await _begun(front, spec, rank=rank, alpha=alpha, init_from=init_from)
    except BaseException:
        opened.pop(name, None)
        raise
    return Trainer(call, front, opened, info)


async def _resumed(front: Front, spec: TrainerSpec, folder: str | Path, **given: object) -> TrainerInfo:
    """Open a trainer in the state that was saved in `folder`. Raises InvalidRequest for other arguments in `given`."""
    for param, value in given.items():
        if value not in (None, (), []):
            raise InvalidRequest(f"{param} is that of the trainer that is resumed", param=param)
    return await front.client.open_trainer(spec, folder=os.path.abspath(folder))


async def _begun(
    front: Front, spec: TrainerSpec, *, rank: int | None, alpha: float | None, init_from: str | None
) -> TrainerInfo:
    """Open a trainer with a new adapter, or with the weights of the adapter `init_from`. Raises InvalidRequest.

    `spec` has everything but the rank and alpha.
    """
    digest = ""
    if init_from is not None:
        try:
            entry = (await front.models.select(init_from)).entry
        except NotFound as e:
            e.param = "init_from"
            raise
        if entry is None:
            raise InvalidRequest(
                "init_from names the base model, which a trainer begins with anyway", param="init_from"
            )
        digest = entry.ref.digest
        rank = entry.info.rank if rank is None else rank
        if alpha is None:
            alpha = entry.info.scale * (math.sqrt(rank) if spec.options.rslora else rank)
    rank = int(limits.check("rank", RANK if rank is None else rank))
    alpha = float(limits.check("alpha", 2.0 * rank if alpha is None else alpha))
    return await front.client.open_trainer(structs.replace(spec, rank=rank, alpha=alpha), digest=digest)
