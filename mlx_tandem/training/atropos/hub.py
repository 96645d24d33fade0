"""Atropos' trajectory API inside of this server: environments post groups, and a trainer takes them in batches.

Which groups make a batch, and the numbers by which environments pace themselves, follow `run-api` of atroposlib 0.4.0.
Unlike there, one batch is made at a time, from the oldest groups, and `step` counts batches that were taken.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any

from msgspec import Meta, Struct

from mlx_tandem.errors import InvalidRequest, NotFound, Overloaded, QuotaExceeded
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.atropos.client import NotRegistered
from mlx_tandem.training.atropos.scored import ScoredData

MOST_BATCHES = 16
"""Batches that may wait to be taken."""

MOST_TOKENS = 1 << 22
"""Tokens of all groups that may wait."""

MOST_BYTES = 256 << 20
"""Bytes of all groups that may wait, with all of their fields, as JSON."""

MOST_ENVIRONMENTS = 256
"""Environments that may register until the data is reset."""

MOST_GROUP = 1024
"""Most sequences of a group."""

LEAST_WEIGHT = 0.01
"""Least weight of an environment, so that none is starved."""

PAUSE_SECONDS = 5.0
"""Seconds after which an environment may post again what had no room."""

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, Meta(max_length=256)]
Folder = Annotated[str, Meta(max_length=4096)]


class Registration(Struct):
    """The registration of a trainer, by which it describes itself."""

    wandb_group: Name
    wandb_project: Name
    batch_size: Annotated[int, Meta(ge=1, le=1 << 20)]  # sequences
    max_token_len: Count
    checkpoint_dir: Folder
    save_checkpoint_interval: Annotated[int, Meta(ge=-1, le=2**31 - 1)]
    starting_step: Count
    num_steps: Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class EnvironmentBody(Struct):
    """The registration of an environment, by which it describes itself."""

    max_token_length: Count
    desired_name: Name
    weight: float
    group_size: Annotated[int, Meta(ge=1, le=MOST_GROUP)]
    min_batch_allocation: Annotated[float, Meta(ge=0, le=1)] | None = None  # least share of a batch


class Group(ScoredData, dict=True):
    """A group with all fields that Atropos has; those here have no effect on learning."""

    advantages: Any = None
    ref_logprobs: Any = None
    messages: Any = None
    distill_token_ids: Any = None
    distill_logprobs: Any = None

    @property
    def size(self) -> int:
        """The number of sequences."""
        return len(self.tokens)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all fields as JSON."""
        return len(dumps(self))


class Environment(Struct):
    """An environment that has registered."""

    said: EnvironmentBody
    name: str
    group_size: int
    connected: bool = True


class Hub:
    """The state of the API. Nothing of it outlives the process, as with Atropos."""

    def __init__(self) -> None:
        self.reading = asyncio.Lock()
        """Held while the groups of a body are decoded."""
        self.reset()

    def reset(self) -> None:
        """Forget the trainer, the environments and all groups."""
        self.trainer: Registration | None = None
        self.latest: Group | None = None
        self.step = 0
        self._started = False  # whether a trainer has asked for a batch, before which no environment may register
        self._environments: list[Environment] = []
        self._queue: list[Group] = []
        self._buffers: dict[int, list[Group]] = {}  # by environment: groups of another size than it has announced

    # -- the trainer ----------------------------------------------------------------------------------------------

    def register(self, trainer: Registration) -> int:
        """Register a trainer and return its number. The first one decides the size of batches."""
        if self.trainer is None:
            self.trainer, self.step = trainer, trainer.starting_step
        return secrets.randbits(128)

    def take(self) -> list[Group] | None:
        """Return the next batch; None while there are too few groups. Raises NotRegistered without a trainer."""
        if self.trainer is None:
            raise NotRegistered
        self._started = True
        shares = {
            i: e.said.min_batch_allocation
            for i, e in enumerate(self._environments)
            if e.connected and e.said.min_batch_allocation is not None
        }
        chosen = batch(self._queue, self.trainer.batch_size, shares)
        if not chosen:
            return None
        return self._taken(chosen)

    def take_oldest(self) -> list[Group] | None:
        """Return the oldest groups, as many as a batch has or a few more, if those that wait would fill two batches.

        For a trainer that needs no exact batch: where the sizes of groups do not divide it, `take` never finds one.
        """
        size, sizes = self.trainer.batch_size if self.trainer else 0, [group.size for group in self._queue]
        if not size or sum(sizes) < 2 * size:
            return None
        sums = accumulate(sizes)
        return self._taken(range(next(i for i, total in enumerate(sums, 1) if total >= size)))

    def _taken(self, chosen: Sequence[int]) -> list[Group]:
        """Take these places out of the queue."""
        found = [self._queue[i] for i in chosen]
        taken = frozenset(chosen)
        self._queue = [group for i, group in enumerate(self._queue) if i not in taken]
        self.step += 1
        return found

    # -- environments ---------------------------------------------------------------------------------------------

    def join(self, said: EnvironmentBody) -> tuple[int, str] | None:
        """Register an environment and return its number and name; None before a trainer has asked for a batch."""
        if not self._started:
            return None
        if len(self._environments) >= MOST_ENVIRONMENTS:
            raise QuotaExceeded(f"{MOST_ENVIRONMENTS} environments have registered, which is the most")
        alike = sum(e.said.desired_name == said.desired_name for e in self._environments)
        name = f"{said.desired_name}_{alike}"
        self._environments.append(Environment(said, name, said.group_size))
        return len(self._environments) - 1, name

    def leave(self, env_id: int) -> None:
        """Record that an environment has gone. Raises NotFound."""
        self._environment(env_id).connected = False

    def put(self, group: Group) -> int | None:
        """Take a group. Return the sequences that wait in the buffer of its environment, if it goes there.

        Raises Overloaded while too much waits, and InvalidRequest for an empty group.
        """
        if not group.size:
            raise InvalidRequest("tokens must have at least one sequence", param="tokens")
        self._check_room(group)
        env_id = group.env_id
        known = self._environments[env_id] if env_id is not None and self._is_known(env_id) else None
        if env_id is None or known is None or known.group_size == group.size:
            self._append(group)
            return None
        buffer = self._buffers.setdefault(env_id, [])
        buffer.append(group)
        chosen = frozenset(filling([each.size for each in buffer], known.group_size))
        for i in sorted(chosen):
            self._append(buffer[i])
        self._buffers[env_id] = [each for i, each in enumerate(buffer) if i not in chosen]
        return sum(each.size for each in self._buffers[env_id])

    def _append(self, group: Group) -> None:
        self._queue.append(group)
        self.latest = group

    def _check_room(self, group: Group) -> None:
        waiting = [*self._queue, *(each for buffer in self._buffers.values() for each in buffer), group]
        sequences = sum(each.size for each in waiting)
        tokens = sum(len(own) for each in waiting for own in each.tokens)
        nbytes = sum(each.nbytes for each in waiting)
        most = MOST_BATCHES * (self.trainer.batch_size if self.trainer else 1)
        too_many = sequences > max(most, MOST_GROUP) or tokens > MOST_TOKENS or nbytes > MOST_BYTES
        if len(waiting) > 1 and too_many:
            # With another status than 503, an environment would drop the group.
            raise Overloaded("too many groups wait to be learned from", retry_after=PAUSE_SECONDS, status=503)

    @property
    def queue_size(self) -> int:
        """The number of groups that wait, without those in buffers."""
        return len(self._queue)

    def pace(self, env_id: int) -> dict[str, float]:
        """Return the numbers by which an environment decides whether to make more. Raises NotFound."""
        own = self._environment(env_id)
        sizes: dict[int | None, int] = {}  # sequences that wait, by environment
        for group in self._queue:
            sizes[group.env_id] = sizes.get(group.env_id, 0) + group.size
        largest = max((group.size for group in self._queue), default=1)
        own.group_size = max(own.group_size, *(g.size for g in self._queue if g.env_id == env_id), 1)
        there = [e for e in self._environments if e.connected]
        total = sum(e.said.max_token_length * max(0.0, e.said.weight) for e in there)
        weight = own.said.max_token_length * own.said.weight / total if total else 0.0
        size = self.trainer.batch_size if self.trainer else 0
        least = {i: int(size * (e.said.min_batch_allocation or 0)) for i, e in enumerate(self._environments)}
        others = sum(
            max(0, -(-count // largest) * largest - (0 if other is None else least.get(other, 0)))
            for other, count in sizes.items()
            if other != env_id and largest > 1
        )
        return {
            "current_step": self.step,
            "queue_size": (sizes.get(env_id, 0) + others) // own.group_size,
            "unallocated_fraction": 1.0 - min(sum(e.said.min_batch_allocation or 0.0 for e in there), 1.0),
            "self_queue_size": sizes.get(env_id, 0) // own.group_size,
            "max_group_size": largest,
            "env_weight": max(LEAST_WEIGHT, weight),
        }

    def _is_known(self, env_id: int) -> bool:
        return 0 <= env_id < len(self._environments)

    def _environment(self, env_id: int) -> Environment:
        if not self._is_known(env_id):
            raise NotFound(f"no environment has registered under {env_id}", param="env_id")
        return self._environments[env_id]


class OwnTrainer:
    """This server's own trainer at its hub, which is asked as `Client` asks an API elsewhere."""

    def __init__(self, hub: Hub):
        self._hub = hub

    async def register(self, **fields: Any) -> int:
        """Register a trainer and return the number of sequences of each batch, which the first trainer has chosen."""
        self._hub.register(Registration(**fields))
        assert self._hub.trainer is not None
        return self._hub.trainer.batch_size

    async def batch(self) -> Sequence[ScoredData] | None:
        """Return the next batch; None while there is none. Raises NotRegistered after a reset."""
        return self._hub.take() or self._hub.take_oldest()


def batch(queue: Sequence[Group], size: int, shares: Mapping[int, float]) -> list[int]:
    """Return the places in the queue of groups that sum to `size` sequences; [] if there are none.

    Groups of one size are packed until a pack is as large as the largest group, since packs of one size always fill a
    batch. `shares` has the least shares of a batch by environment. The others wait while an environment with a share
    has no pack. With shares, a pack has groups of one environment only.
    """
    largest = max((group.size for group in queue), default=0)
    if not largest or size % largest:
        return []
    open_packs: dict[tuple[int | None, int], list[int]] = {}
    packs: list[list[int]] = []
    for i, group in enumerate(queue):
        key = (group.env_id if shares else None, group.size)
        pack = open_packs.setdefault(key, [])
        pack.append(i)
        if len(pack) * group.size == largest:
            packs.append(open_packs.pop(key))
    chosen: list[list[int]] = []
    for env_id, share in shares.items():
        own = [pack for pack in packs if queue[pack[0]].env_id == env_id]
        if (needed := int(size * share)) and not own:
            return []
        chosen += own[: -(-needed // largest)]
    rest = [pack for pack in packs if pack not in chosen]
    chosen = [*chosen, *rest][: size // largest]
    return [i for pack in chosen for i in pack] if len(chosen) == size // largest else []


def filling(sizes: Sequence[int], target: int) -> tuple[int, ...]:
    """Return the places of sizes that sum to `target`, the first that are found from the beginning; () if none do."""
    ways: dict[int, tuple[int, ...]] = {0: ()}
    for i, size in enumerate(sizes):
        for total, chosen in list(ways.items()):
            if total + size <= target:
                ways.setdefault(total + size, (*chosen, i))
        if target in ways:
            return ways[target]
    return ()
