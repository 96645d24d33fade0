"""Scored completions: what one is, and where they wait until they are trained on."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from mlx_tandem import limits
from mlx_tandem.engine.learning import WHOLE, Truncation
from mlx_tandem.errors import InvalidRequest

SEEN_IDS = 1 << 17
"""So many ids are remembered after their trajectories have gone."""

DropReason = Literal["duplicate", "stale", "overflow", "equal_rewards", "no_reward"]
"""Why a trajectory is not learned from. duplicate: its id was seen before; stale: it is too many versions away;
overflow: the buffer was full; equal_rewards: no sibling of its group has another reward; no_reward: none came in time.
"""

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
"""Ids and groups that come from outside."""


class Trajectory(Struct, frozen=True, array_like=True):
    """One completion and its reward. Logprobs are natural logarithms, one for each of `tokens`."""

    id: str  # the same id twice is taken once
    group: str  # siblings for one prompt share it, or all answers that are scored alike (ACROSS)
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # the completion, stop token included
    logprobs: tuple[float, ...]  # of the distribution drawn from
    model_logprobs: tuple[float, ...]  # of the model's untruncated distribution (temperature 1); empty when external
    versions: tuple[int, ...]  # of the adapter, per token; 0: the base; empty: unknown
    temperature: float
    reward: float
    external: bool = False  # made by something else: logprobs are computed again, never believed
    created: float = 0.0  # seconds since the epoch
    metadata: dict[str, Any] = {}
    truncation: Truncation = WHOLE  # of the draw
    finish_reason: str = ""  # why the completion ended; empty: unknown
    mask: tuple[int, ...] = ()  # 1: the policy's own token, 0: what a tool or a user said; empty: all are its own
    turn_rewards: tuple[float, ...] = ()  # one for each turn, part of `reward`; empty: the reward is for the whole
    drawn: bool = False  # the server has drawn it by itself, to compare a request's answer with

    @property
    def turns(self) -> list[slice]:
        """The places in `tokens` of the policy's turns."""
        if not self.mask:
            return [slice(0, len(self.tokens))]
        runs = [(own, len(list(run))) for own, run in groupby(self.mask)]
        ends = list(accumulate(length for _, length in runs))
        return [slice(end - length, end) for (own, length), end in zip(runs, ends, strict=True) if own]


ACROSS = "across:"
"""How the names of groups across prompts begin, whose members are answers to any prompts that are scored alike."""


def is_across(group: str) -> bool:
    """Return whether this is the name of a group across prompts."""
    return group.startswith(ACROSS)


def new_id() -> str:
    """Return a new id of a trajectory, which nobody can guess."""
    return f"traj-{secrets.token_hex(12)}"


def same_prompt(prompt: Sequence[int], rest: bytes = b"") -> str:
    """Return the name of the group of all answers to this prompt. `rest` is what else they have to have in common."""
    digest = hashlib.blake2b(b"".join(t.to_bytes(4, "little") for t in prompt) + rest, digest_size=12)
    return f"prompt-{digest.hexdigest()}"


def check_label(value: str, param: str) -> str:
    """Return `value`, an id or the name of a group. Raises InvalidRequest for one that it may not be."""
    if not LABEL.fullmatch(value):
        raise InvalidRequest(
            f"{param} must be 1 to 128 letters, digits and '._:/@-', starting with a letter or digit", param=param
        )
    return value


def check_rewards(
    reward: float | None, turn_rewards: Sequence[float], turns: int, at: str = ""
) -> tuple[float, tuple[float, ...]]:
    """Return the reward of a whole trajectory of so many turns, and those of its turns; () where all is for the whole.

    Raises InvalidRequest naming the field; `at` is the name of what holds it.
    """
    if reward is None and not turn_rewards:
        raise InvalidRequest(
            f"{at}reward is missing: give it, {at}turn_rewards, or both",
            param=f"{at}reward",
            code="missing_required_parameter",
        )
    whole = 0.0 if reward is None else float(limits.check("reward", reward, f"{at}reward"))
    if not turn_rewards:
        return whole, ()
    if len(turn_rewards) != turns:
        raise InvalidRequest(
            f"{at}turn_rewards has {len(turn_rewards)} entries for {turns} answers", param=f"{at}turn_rewards"
        )
    each = [float(limits.check("reward", r, f"{at}turn_rewards[{i}]")) for i, r in enumerate(turn_rewards)]
    each[-1] += whole
    return math.fsum(each), tuple(each)


def staleness(versions: Iterable[int], current_version: int, exempt: Container[int] = (0,)) -> int:
    """Return how many versions lie between `current_version` and the farthest of those that made a completion.

    The number of the base, and of other versions in `exempt`, says nothing of how far they are: only the logprobs do.
    """
    return max((abs(current_version - v) for v in versions if v not in exempt), default=0)


@dataclass
class _Group:
    size: int  # how many it will have had; 0: nobody knows
    place: int  # higher: it comes later
    arrived: int = 0
    members: list[Trajectory] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return 0 < self.size <= self.arrived

    @property
    def size_left(self) -> int:
        """The size of a group that has only these members and waits for as many others as this one does; 0: unknown.

        A group may have more arrivals than its size, so it is not the size less those that were removed.
        """
        return self.size and len(self.members) + max(0, self.size - self.arrived)

    @property
    def varies(self) -> bool:
        return any(t.reward != self.members[0].reward for t in self.members)

    @property
    def usable(self) -> bool:
        return self.varies and (self.complete or not self.size)

    def first(self, count: int) -> list[Trajectory]:
        """Return the first `count` members, or as many as it takes until their rewards vary."""
        last = next(i for i, t in enumerate(self.members) if t.reward != self.members[0].reward)
        return self.members[: max(count, last + 1)]


class Counts(Struct):
    """What happened to trajectories, since the very beginning unless something else is said."""

    collected: int = 0
    taken: int = 0
    dropped_stale: int = 0
    dropped_overflow: int = 0
    dropped_duplicate: int = 0
    skipped_groups: int = 0  # complete, and every reward the same: nothing to learn from
    dropped_no_reward: int = 0
    drawn: int = 0  # of those collected, by the server itself

    @property
    def dropped(self) -> dict[DropReason, int]:
        """How many were dropped one by one, by reason."""
        return {
            "stale": self.dropped_stale,
            "duplicate": self.dropped_duplicate,
            "overflow": self.dropped_overflow,
            "no_reward": self.dropped_no_reward,
        }

    def since(self, before: Counts) -> Counts:
        """Return what was counted after `before`."""
        return Counts(**{name: count - getattr(before, name) for name, count in asdict(self).items()})


class Taken(Struct, frozen=True):
    """What a buffer hands out."""

    groups: tuple[tuple[Trajectory, ...], ...]  # to be trained on
    stale: tuple[str, ...]  # ids of what was dropped for its age


@dataclass
class Changes:
    """The changes of a buffer since it was written down."""

    groups: dict[str, None] = field(default_factory=dict)  # names of those that may have other members or another place
    gone: dict[str, DropReason] = field(default_factory=dict)  # trajectories that the buffer itself has dropped
    forgotten: dict[str, None] = field(default_factory=dict)  # ids that are no longer known


class Buffer:
    """At most `capacity` trajectories, by group, each handed out at most once.

    A group whose size is known is handed out when it is complete, and goes, counted, when it is complete and its
    rewards do not vary. One of unknown size is handed out as soon as its rewards vary; what arrives later begins a new
    group of that name. For lack of room the groups that began first go first, whole.

    A group across prompts never ends: its oldest members are handed out, and go for lack of room, one by one.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.counts = Counts()
        self._groups: OrderedDict[str, _Group] = OrderedDict()  # in the order of their first member
        self._group_of: dict[str, str] = {}
        self._seen: OrderedDict[str, int] = OrderedDict()  # positions, which ascend
        self._usable = 0
        self._place = self._position = 0  # the highest ever given
        self._changes = Changes()

    def __len__(self) -> int:
        return len(self._group_of)

    @property
    def most_ids(self) -> int:
        """Most ids that are remembered."""
        return max(SEEN_IDS, 2 * self.capacity)

    @property
    def usable(self) -> int:
        """Trajectories in groups that `take` would hand out now, stale ones among them."""
        return self._usable

    @property
    def alike(self) -> int:
        """Answers in groups across prompts all of whose rewards are the same so far."""
        return sum(len(g.members) for name, g in self._groups.items() if is_across(name) and not g.varies)

    @property
    def held(self) -> list[tuple[Trajectory, int]]:
        """All that wait, each with the size to `add` it with: in this order they make another buffer the same."""
        return [(t, group.size_left) for group in self._groups.values() for t in group.members]

    @property
    def seen(self) -> tuple[str, ...]:
        """Ids that will not be taken again, oldest first."""
        return tuple(self._seen)

    def changed(self) -> Changes:
        """Return what has changed since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def position(self, id: str) -> int:
        """Return where an id is in the order in which ids are forgotten; 0: it is forgotten."""
        return self._seen.get(id, 0)

    def group(self, name: str) -> tuple[int, int] | None:
        """Return the size to `add` a group's members with, and its place among the groups; None: there is no group."""
        group = self._groups.get(name)
        return None if group is None else (group.size_left, group.place)

    def restore(
        self, held: Iterable[tuple[Trajectory, int, int]], seen: Iterable[tuple[str, int]], counts: Counts
    ) -> None:
        """Bring an empty buffer to where another one was, whose trajectories had these sizes and places and whose ids
        these positions. What there is no room for any longer is dropped.
        """
        for trajectory, size, place in held:
            self._place = place - 1  # the first member of a group takes the next place
            self.add(trajectory, size)
        own = self.counts
        self.counts = replace(counts, dropped_overflow=counts.dropped_overflow + own.dropped_overflow)
        self._seen = OrderedDict(seen)
        self._position = max(self._seen.values(), default=0)
        self._place = max((group.place for group in self._groups.values()), default=0)
        self._changes.forgotten.clear()

    def knows(self, id: str) -> bool:
        """Return whether a trajectory with this id was seen before, so that it is not taken again."""
        return id in self._seen or id in self._group_of

    def add(self, trajectory: Trajectory, size: int = 0) -> bool:
        """False: its id was seen before, and nothing is changed. `size`: how many its group will have in all; 0: nobody
        knows. What was said with the group's first member holds.
        """
        if self.knows(trajectory.id):
            self.counts.dropped_duplicate += 1
            return False
        self.remember((trajectory.id,))
        self.counts.collected += 1
        self.counts.drawn += trajectory.drawn
        while len(self) >= self.capacity:
            # Its own group last: the rest of that is still to come.
            oldest = next((name for name in self._groups if name != trajectory.group), trajectory.group)
            before = len(self)
            if is_across(oldest):
                first = self._groups[oldest].members[0].id
                self.remove([first])
                self._changes.gone[first] = "overflow"
            else:
                self._remove(oldest, "overflow")
            self.counts.dropped_overflow += before - len(self)
        group = self._groups.get(trajectory.group)
        if group is None:
            group = self._groups[trajectory.group] = _Group(size, self._next_place())
        self._changes.groups[trajectory.group] = None
        self._usable -= len(group.members) if group.usable else 0
        group.members.append(trajectory)
        group.arrived += 1
        self._group_of[trajectory.id] = trajectory.group
        self._usable += len(group.members) if group.usable else 0
        if group.complete and not group.varies:
            self.counts.skipped_groups += 1
            self._remove(trajectory.group, "equal_rewards")
        return True

    def remember(self, ids: Iterable[str]) -> None:
        """Trajectories with these ids are not taken from now on."""
        for id in ids:
            self._position += 1
            self._seen[id] = self._position
            self._seen.move_to_end(id)
            self._changes.forgotten.pop(id, None)
        while len(self._seen) > self.most_ids:
            self._changes.forgotten[self._seen.popitem(last=False)[0]] = None

    def take(self, count: int, current_version: int, max_staleness: int, exempt: Container[int] = (0,)) -> Taken:
        """Whole groups in the order in which they began, until there are `count` trajectories or no usable group is
        left; the last group may go beyond `count`. What is more than `max_staleness` versions away goes first, and its
        ids are remembered from now on as those of an update are: they may be the oldest that are known.
        """
        stale = [
            t.id
            for g in self._groups.values()
            for t in g.members
            if staleness(t.versions, current_version, exempt) > max_staleness
        ]
        self.remove(stale)
        self.remember(stale)
        self.counts.dropped_stale += len(stale)
        groups: list[tuple[Trajectory, ...]] = []
        total = 0
        for name in [name for name, group in self._groups.items() if group.usable]:
            if total >= count:
                break
            group = self._groups[name]
            groups.append(tuple(group.first(count - total) if is_across(name) else group.members))
            total += len(groups[-1])
            self.remove([t.id for t in groups[-1]])
        self.counts.taken += total
        return Taken(tuple(groups), tuple(stale))

    def get(self, id: str) -> Trajectory | None:
        """Return the trajectory with this id, if it waits here."""
        name = self._group_of.get(id)
        return None if name is None else next(t for t in self._groups[name].members if t.id == id)

    def pick(self, ids: Iterable[str]) -> list[Trajectory]:
        """Hand out those of `ids` that wait here and have a sibling among them with another reward."""
        wanted = frozenset(ids)
        found = []
        for group in self._groups.values():
            own = [t for t in group.members if t.id in wanted]
            found += own if any(t.reward != own[0].reward for t in own) else []
        self.remove([t.id for t in found])
        self.counts.taken += len(found)
        return found

    def shrink(self, name: str) -> None:
        """Note that one member of a group of known size will never come; a complete group lacks none."""
        group = self._groups.get(name)
        if group is None or group.arrived >= group.size:
            return
        group.size -= 1
        self._changes.groups[name] = None
        self._usable += len(group.members) if group.usable else 0
        if group.complete and not group.varies:
            self.counts.skipped_groups += 1
            self._remove(name, "equal_rewards")

    def remove(self, ids: Iterable[str]) -> None:
        """Take out those of `ids` that wait here; their siblings stay, unless nothing can be learned from them."""
        touched: dict[str, None] = {}  # in the order of `ids`: groups move as the update was made of them
        for id in ids:
            name = self._group_of.pop(id, None)
            if name is not None:
                group = self._groups[name]
                self._usable -= len(group.members) if group.usable else 0
                group.members = [t for t in group.members if t.id != id]
                self._usable += len(group.members) if group.members and group.usable else 0
                touched[name] = None
        for name in touched:
            self._changes.groups[name] = None
            group = self._groups[name]
            if not group.members:
                del self._groups[name]
            elif group.complete and not group.varies:
                self.counts.skipped_groups += 1
                self._remove(name, "equal_rewards")
            elif is_across(name):
                self._groups.move_to_end(name)  # it never ends: others have their turn, too
                group.place = self._next_place()

    def _next_place(self) -> int:
        self._place += 1
        return self._place

    def _remove(self, name: str, reason: DropReason) -> None:
        group = self._groups.pop(name)
        self._usable -= len(group.members) if group.usable else 0
        for t in group.members:
            del self._group_of[t.id]
            self._changes.gone[t.id] = reason
