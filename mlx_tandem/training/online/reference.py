"""The policy that `kl_coef` keeps to, where that is not the base: a trainer of its own, which only runs forward."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.engine.learning import WHOLE, Batch, Datum, LossConfig
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.online.policy import PolicyTrainer
from mlx_tandem.training.online.trial import Reference
from mlx_tandem.training.store.records import Began


class ReferencePolicy:
    """The reference of an update's divergence. While no version is accepted, that is what learning begins with."""

    def __init__(
        self,
        config: RLTrainingConfig,
        client: EngineClient,
        trainer: PolicyTrainer,
        ledger: Ledger,
    ) -> None:
        self._config, self._client, self._trainer, self._ledger = config, client, trainer, ledger
        self._name = f"{config.adapter}-reference"
        self._open = ("", -1)  # the digest that the trainer has, and in which engine

    @property
    def is_base(self) -> bool:
        """Whether the divergence is that from the base, which a pass computes by itself."""
        kind = self._config.kl_reference
        initial = kind == "init" or self._accepted is None
        return not self._config.kl_coef or kind == "base" or (initial and not self._config.init_from)

    @property
    def _accepted(self) -> Reference | None:
        return self._ledger.counters.trial.accepted

    async def filled(self, began: Began) -> Began:
        """Return an update whose data has the logprobs of the reference. Raises what the engine raises."""
        if self.is_base:
            return began
        await self._bring()
        filled = []
        for batch in began.batches:
            # Tokens are compared under the whole vocabulary, however they were drawn.
            whole = tuple(replace(d, truncation=WHOLE) for d in batch.data)
            asked = Batch(self._name, whole, LossConfig("cross_entropy"))
            (found,) = await self._client.run_pass(
                [asked], forward_only=True, micro_batch_tokens=began.micro_batch_tokens
            )
            own = (replace(d, reference=r) for d, r in zip(batch.data, found.logprobs, strict=True))
            filled.append(Batch(batch.trainer, tuple(own), batch.loss))
        return replace(began, batches=tuple(filled))

    async def logprobs(self, data: Sequence[Datum], micro_batch_tokens: int) -> tuple[tuple[float, ...], ...]:
        """Return the logprobs of these data by what learning began with, or by the accepted version where the settings
        say so. Raises what the engine raises.
        """
        await self._bring()
        asked = Batch(self._name, tuple(data), LossConfig("cross_entropy"))
        (found,) = await self._client.run_pass([asked], forward_only=True, micro_batch_tokens=micro_batch_tokens)
        return found.logprobs

    async def _bring(self) -> None:
        """Open the trainer with the weights of the reference, unless it has them already."""
        accepted = self._accepted if self._config.kl_reference == "accepted" else None
        if accepted is None:
            folder, digest = "", await self._trainer.initial()
        else:
            folder, digest = str(self._ledger.checkpoints.path(accepted.checkpoint)), accepted.digest
        if self._open != (digest, self._client.epoch):
            await self._client.open_trainer(
                self._trainer.spec(self._name), folder=folder, digest="" if folder else digest
            )
            self._open = (digest, self._client.epoch)
