"""One model that a client trains: an open trainer in the engine, and what the client asks of it, in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, Datum, LossConfig, TrainerSpec
from mlx_tandem.errors import EngineError, InvalidRequest, TandemError
from mlx_tandem.log import log
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.tinker.checkpoints import Checkpoint, Checkpoints, Kind, Run
from mlx_tandem.training.tinker.order import Order
from mlx_tandem.training.tinker.promises import Result
from mlx_tandem.training.tinker.versions import Versions
from mlx_tandem.types import AdapterRef

ALPHA = 32.0
"""Alpha of every adapter: its delta is scaled by this over the rank."""


@dataclass(frozen=True)
class Kept:
    """The client's wishes for a checkpoint that it saves."""

    name: str
    seconds: float | None = None  # time until it expires; None: never
    metadata: Mapping[str, str] | None = None
    overwrite: bool = False


class TrainedModel:
    """A model of one session. The methods that train or save are done in the order of the client's numbers (`order`).

    A gradient counts only with all that belong to the same step: after a pass that was refused or has failed, the next
    step of the optimiser fails, and the gradients since the last step are dropped.
    """

    def __init__(self, client: EngineClient, checkpoints: Checkpoints, versions: Versions, run: Run, order: Order):
        """Describe a model that `open` or `load` opens. `run` says what it is."""
        self.run = run
        self.order = order
        self.asked = time.time()  # when the client last asked for something, in seconds since the epoch
        self.inflight: AdapterRef | None = None  # what in-flight samplers use now
        self._client = client
        self._checkpoints = checkpoints
        self._versions = versions
        self._engine = -1  # number of restarts of the engine that has the trainer; -1: none has
        self._asked = -1  # the same of the engine that was asked to open it
        self._missing = ""  # why gradients of the present step are missing

    @property
    def id(self) -> str:
        """The model's id, under which the engine knows the trainer."""
        return self.run.id

    # -- opening ------------------------------------------------------------------------------------------------

    async def open(self, seed: int) -> None:
        """Open the trainer with a new adapter. Raises InvalidRequest for what cannot be trained here."""
        await self._opened(TrainerSpec(self.id, self.run.rank, ALPHA, (), seed, parts=self.run.parts))

    async def load(self, checkpoint: Checkpoint, *, optimizer: bool) -> None:
        """Open the trainer as a checkpoint has it, in place of what it was. Without `optimizer` AdamW begins anew.

        Raises InvalidRequest for a checkpoint without the optimiser's state, and ModelError for one that is damaged.
        """
        if optimizer and checkpoint.kind != "weights":
            raise InvalidRequest(f"{checkpoint.path} has no state of the optimizer: it is for samplers", param="path")
        source = self._checkpoints.source(checkpoint)
        spec = TrainerSpec(self.id, checkpoint.rank, ALPHA, parts=checkpoint.parts)
        digest = ""
        if not optimizer:
            await self._versions.forget(source)  # The engine may have dropped it from memory since it was read.
            digest = (await self._versions.read(source, self.id)).digest
        await self._opened(spec, folder=source.path if optimizer else "", digest=digest)
        self.run = Run(
            self.id,
            self.run.owner,
            self.run.base_model,
            checkpoint.rank,
            checkpoint.parts,
            self.run.created,
            self.run.metadata,
        )

    async def _opened(self, spec: TrainerSpec, *, folder: str = "", digest: str = "") -> None:
        """Open the trainer. It has to be closed even if nobody waits for the answer."""
        self._asked = self._client.epoch
        await self._client.open_trainer(spec, folder=folder, digest=digest)
        self._engine = self._asked
        self._missing = ""

    def _check_open(self) -> None:
        """Raise an error if the engine has not got the trainer."""
        if self._engine < 0:
            raise InvalidRequest("this model was unloaded, or could not be opened", param="model_id")
        if self._engine != self._client.epoch:
            raise EngineError(
                "the engine has restarted, and this model's trainer is gone with it: go on from a checkpoint"
            )

    # -- training -----------------------------------------------------------------------------------------------

    async def run_pass(
        self, data: tuple[Datum, ...], loss: LossConfig, *, forward_only: bool, write: Callable[[BatchResult], Result]
    ) -> Result:
        """Run a pass and return what `write` makes of its result. Unless `forward_only`, gradients are added up."""
        self._check_open()
        try:
            (found,) = await self._client.run_pass([Batch(self.id, data, loss)], forward_only=forward_only)
        except TandemError as e:
            if not forward_only:
                self.miss(e.message)
            raise
        return await asyncio.to_thread(write, found)

    def miss(self, why: str) -> None:
        """Note that gradients of the present step are missing."""
        self._missing = self._missing or why

    async def step(self, adam: AdamParams) -> Result:
        """Take one step of the optimiser with the gradients since the last one.

        Raises InvalidRequest when gradients are missing or are not finite. Then nothing is changed but that the
        gradients are dropped.
        """
        self._check_open()
        if self._missing:
            why, self._missing = self._missing, ""
            await self._drop_gradients()
            raise InvalidRequest(
                f"a forward_backward of this step has failed, so its gradients are dropped, and no step is taken: {why}"
            )
        done = await self._client.step_trainer(self.id, adam)
        if not done.finite:
            raise InvalidRequest("the gradients are not finite: they are dropped, and no step is taken")
        return Result(dumps({"metrics": {"grad_norm:mean": done.grad_norm, "step:max": float(done.step)}}))

    async def _drop_gradients(self) -> None:
        """Drop all gradients. The last step is kept first, as it would be taken back with them otherwise."""
        await self._client.settle_trainer(self.id, keep=True)
        await self._client.settle_trainer(self.id, keep=False)

    # -- checkpoints and versions -------------------------------------------------------------------------------

    async def save(self, kind: Kind, kept: Kept) -> Result:
        """Save a checkpoint and return its path. Raises InvalidRequest for a name that is taken, and StorageError."""
        self._check_open()
        now = time.time()
        new = Checkpoint(
            self.id,
            kind,
            kept.name,
            self.run.rank,
            self.run.parts,
            now,
            0,
            None if kept.seconds is None else now + kept.seconds,
            dict(kept.metadata or {}),
        )

        async def write(folder: str) -> None:
            await self._client.save_trainer(self.id, folder, optimizer=kind == "weights")

        saved = await self._checkpoints.save(self.run, new, write, overwrite=kept.overwrite)
        await self._versions.forget(self._checkpoints.source(saved))
        return Result(dumps({"path": saved.path, "type": "save_weights" + "_for_sampler" * (kind != "weights")}))

    async def publish(self) -> AdapterRef:
        """Return a version with the present weights, which whoever holds it releases."""
        self._check_open()
        return await self._versions.publish(self.id, f"{self.id}:snapshot")

    async def publish_inflight(self) -> None:
        """Let the in-flight samplers of this model, and their running requests, go on under the present weights."""
        self._check_open()
        before, self.inflight = self.inflight, await self._versions.publish(self.id, f"{self.id}:inflight")
        self._client.follow_adapter(self.inflight)
        if before is not None:
            await self._versions.release(before)

    async def close(self) -> None:
        """End the queue, give the trainer's memory back, and release what in-flight samplers use.

        Requests to these samplers that run finish.
        """
        self.order.close()
        inflight, self.inflight = self.inflight, None
        try:
            if inflight is not None:
                await self._versions.release(inflight)
            if self._asked == self._client.epoch:
                self._asked = self._engine = -1
                await self._client.close_trainer(self.id)
        except TandemError as e:
            log("trainer not closed", model=self.id, error=e.message)
