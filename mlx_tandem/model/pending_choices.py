"""Choices of earlier starts, and the kernels of adapters, which may be chosen only when the first adapter is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from msgspec import structs

from mlx_tandem.config import EngineConfig
from mlx_tandem.model import kernel_checks
from mlx_tandem.model.choices import Choices, Kept, Subject
from mlx_tandem.model.kernels.checking import Pieces
from mlx_tandem.model.loader import LoadedModel
from mlx_tandem.model.ops.lora import choice as lora
from mlx_tandem.model.ops.lora.choice import AdapterLimits
from mlx_tandem.model.ops.lora.state import LoraState, use_kernels

log = logging.getLogger(__name__)

LATER = "the kernels are checked and timed when the first adapter is loaded"
"""Reason for the back end of adapters while none is configured or loaded."""


def find_kept(
    kept: Kept, subject: Subject, config: EngineConfig, model: LoadedModel
) -> tuple[Choices | None, AdapterLimits | None]:
    """Return the choices of an earlier start, and separately those for adapters if they can wait; None for neither."""
    again = kept.find(subject)
    if again is None or not lora.can_wait(model.module, config.lora):
        return again, None
    known = again.kernels.adapters
    return structs.replace(again, kernels=structs.replace(again.kernels, adapters=None)), known


@dataclass(slots=True)
class PendingChoices:
    """The choices that a start keeps for the next one, while the kernels of adapters may still be chosen."""

    config: EngineConfig
    model: LoadedModel
    adapters: LoraState
    known: AdapterLimits | None
    kept: Kept | None
    room: int
    """Bytes that the largest arrays of a measurement may have, beside a server that runs."""

    choices: Choices | None = None
    """Everything that was chosen at start, to which the choice is added for the next start."""

    def take(self, choices: Choices, again: Choices | None) -> Choices:
        """Note and return what was chosen at start, and keep it unless an earlier start chose the same, `again`."""
        self.choices = choices
        if choices != again:
            self._keep(choices, choices.kernels.adapters or self.known)
        return choices

    def _keep(self, choices: Choices, adapters: AdapterLimits | None) -> None:
        if self.kept is not None:
            kernels = structs.replace(choices.kernels, adapters=adapters)
            self.kept.keep(structs.replace(choices, kernels=kernels))

    def prepare(self) -> Pieces[tuple[str, str]]:
        """Choose the kernels of adapters piece by piece, and return their back end and the reason for it."""
        found = yield from kernel_checks.choosing_adapters(self.config, self.model, self.known, self.room)
        if found.chosen is not None:
            use_kernels(self.adapters, found.chosen)
        log.info("adapters by %s: %s", self.adapters.backend, found.reason)
        limits = lora.described(found)
        if self.choices is not None and limits != self.known:
            self._keep(self.choices, limits)
        return self.adapters.backend, found.reason
