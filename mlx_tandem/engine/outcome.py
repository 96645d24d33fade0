"""The outcome of a step, as the scheduler hands it to the engine's loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_tandem.types import Delta


@dataclass(slots=True)
class StepOutcome:
    """The outcome of a step that was read: new tokens, and requests that have failed.

    `failed` are requests whose logits were not finite; `unencoded` has the reason why an image could not be
    encoded, by its request.
    """

    deltas: list[Delta] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    unencoded: dict[int, str] = field(default_factory=dict)
