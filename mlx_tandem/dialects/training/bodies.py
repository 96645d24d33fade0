"""The bodies of requests about learning."""

from __future__ import annotations

from msgspec import Struct

from mlx_tandem.training.external import External


class AdapterQuery(Struct):
    """The query of a route about one trained adapter. Without a name, the default one is meant."""

    adapter: str | None = None


class UpdateBody(Struct, forbid_unknown_fields=True):
    """The body of a request for an update."""

    trajectories: list[str | External] = []  # ids of collected ones are texts; empty: all that were collected
    update_inference: bool = True  # serve the result as a new version
    checkpoint_name: str | None = None  # save the result under this name
    wait: bool = False  # answer only when the update has ended


class RewardBody(Struct, forbid_unknown_fields=True):
    """The body of a request that says what a trajectory is worth."""

    reward: float | None = None  # of the whole
    turn_rewards: list[float] = []  # one for each answer; `reward` counts for the last one then


class NoBody(Struct, forbid_unknown_fields=True):
    """A body without any field."""


class CheckpointBody(Struct, forbid_unknown_fields=True):
    """The body of a request to save a checkpoint. Without a name, the server chooses one."""

    name: str | None = None


class RollbackBody(Struct, forbid_unknown_fields=True):
    """The body of a request to return to an earlier version or to a checkpoint."""

    to: str | int | None = None  # a version or a checkpoint; absent: the last good version


class SwitchBody(Struct, forbid_unknown_fields=True):
    """The body of a request to serve another version under the trained adapter's name."""

    version: str | int  # a version, a checkpoint, or "latest": what the trainer has now
