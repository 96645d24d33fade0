"""The bodies of requests about learning."""

from __future__ import annotations

from msgspec import Struct

from mlx_tandem.training.external import External


class UpdateBody(Struct, forbid_unknown_fields=True):
    """An update by hand."""

    trajectories: list[External] = []  # none: what has been collected
    update_inference: bool = True  # serve what was learned
    checkpoint_name: str | None = None  # save it under this name
    wait: bool = False  # answer when it is done


class NoBody(Struct, forbid_unknown_fields=True):
    """No field at all."""


class CheckpointBody(Struct, forbid_unknown_fields=True):
    """A checkpoint to be saved; without a name it gets one by itself."""

    name: str | None = None


class RollbackBody(Struct, forbid_unknown_fields=True):
    """The version or checkpoint to go back to."""

    to: str | int | None = None  # a version or a checkpoint; absent: the last good one


class SwitchBody(Struct, forbid_unknown_fields=True):
    """The version that the trained adapter's name shall stand for."""

    version: str | int
