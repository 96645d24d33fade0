"""Trajectories whose reward is still missing: what was given and said so far, until the reward comes or they go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from mlx_tandem.engine.learning import WHOLE, Truncation
from mlx_tandem.limits import MAX_OPEN_TRAJECTORY_BYTES
from mlx_tandem.training.trajectories import Trajectory


class Exchange(Struct, frozen=True, array_like=True):
    """What the policy was given, and what it answered. Logprobs and versions are one for each of `tokens`."""

    given: tuple[int, ...]  # the prompt; later what tools and users have said since the last answer
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    model_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    messages: int = 0  # of the conversation before the answer; 0: the prompt was no conversation
    rendered: bytes = b""  # digest of this conversation as the chat template writes it
    finish_reason: str = ""  # why the answer ended; empty: unknown


class Beginning(Struct, frozen=True, array_like=True):
    """What is the same for a trajectory from its first answer on."""

    group: str
    size: int  # trajectories of its group; 0: nobody knows
    temperature: float
    metadata: dict[str, Any] = {}
    truncation: Truncation = WHOLE  # of the draw


@dataclass
class OpenTrajectory:
    """One trajectory without a reward. Its exchanges are kept as bytes, which take a fifth of the memory."""

    begun: Beginning
    touched: float  # time of the last answer, in seconds since the epoch
    pieces: list[bytes] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of bytes."""
        return sum(map(len, self.pieces))

    @property
    def exchanges(self) -> list[Exchange]:
        """What was given and said, in order."""
        return [_DECODER.decode(piece) for piece in self.pieces]

    def add(self, exchange: Exchange) -> None:
        """Add what was given and said next."""
        self.pieces.append(_ENCODER.encode(exchange))

    def rewarded(self, id: str, reward: float, turn_rewards: Sequence[float], created: float) -> Trajectory:
        """Return the trajectory with its reward: that of the whole, or one for each turn."""
        first, *later = self.exchanges
        made = Trajectory(
            id=id,
            group=self.begun.group,
            prompt=first.given,
            tokens=first.tokens,
            logprobs=first.logprobs,
            model_logprobs=first.model_logprobs,
            versions=first.versions,
            temperature=self.begun.temperature,
            reward=reward,
            created=created,
            metadata=self.begun.metadata,
            turn_rewards=tuple(turn_rewards),
            truncation=self.begun.truncation,
            finish_reason=[first, *later][-1].finish_reason,
        )
        if not later:
            return made
        columns: dict[str, list[Any]] = {name: list(getattr(first, name)) for name in _COLUMNS}
        mask = [1] * len(first.tokens)
        for each in later:
            given = len(each.given)
            mask += [0] * given + [1] * len(each.tokens)
            for name, zero in (("logprobs", 0.0), ("model_logprobs", 0.0), ("versions", each.versions[0])):
                columns[name] += [zero] * given + list(getattr(each, name))
            columns["tokens"] += [*each.given, *each.tokens]
        lists = {name: tuple(column) for name, column in columns.items()}
        return msgspec.structs.replace(made, mask=tuple(mask), **lists)


_COLUMNS = ("tokens", "logprobs", "model_logprobs", "versions")
_DECODER = msgspec.msgpack.Decoder(Exchange)
_ENCODER = msgspec.msgpack.Encoder()


class OpenTrajectories:
    """At most `most` trajectories in `most_bytes`, none older than `seconds` since its last answer.

    Those that were continued longest ago go first.
    """

    def __init__(self, most: int, seconds: float, most_bytes: int = MAX_OPEN_TRAJECTORY_BYTES) -> None:
        self._most, self._seconds, self._most_bytes = most, seconds, most_bytes
        self._open: OrderedDict[str, OpenTrajectory] = OrderedDict()  # by the time of the last answer
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, id: str) -> bool:
        return id in self._open

    @property
    def bytes(self) -> int:
        """The number of bytes of all."""
        return self._bytes

    def get(self, id: str) -> OpenTrajectory | None:
        """Return a trajectory; None when it is not open."""
        return self._open.get(id)

    def put(self, id: str, begun: Beginning | None, exchange: Exchange, now: float) -> bool:
        """Begin a trajectory, or (`begun` None) add an exchange to one; return whether it is open."""
        if begun is not None:
            self._open[id] = OpenTrajectory(begun, now)
        elif id not in self._open:
            return False
        entry = self._open[id]
        entry.touched = now
        entry.add(exchange)
        self._bytes += len(entry.pieces[-1])
        self._open.move_to_end(id)
        return True

    def superfluous(self, now: float) -> list[str]:
        """Return the ids of those that have to go, as they are too old or there are too many."""
        found: list[str] = []
        bytes_left, left = self._bytes, len(self._open)
        for id, entry in self._open.items():
            old = now - entry.touched > self._seconds
            if not (old or left > self._most or bytes_left > self._most_bytes):
                break
            found.append(id)
            left, bytes_left = left - 1, bytes_left - entry.size
        return found

    def close(self, id: str) -> OpenTrajectory | None:
        """Take out a trajectory that has its reward; None when it is not open."""
        entry = self._open.pop(id, None)
        self._bytes -= 0 if entry is None else entry.size
        return entry

    def forget(self, id: str) -> str | None:
        """Take out a trajectory that will have no reward. Return its group if that waits for it."""
        entry = self.close(id)
        if entry is None or not entry.begun.size:
            return None
        for other, begun in self.of_group(entry.begun.group):
            if begun.size > 1:  # 0: nobody knows the size; 1: it is alone, whatever others of this name said
                self._open[other].begun = msgspec.structs.replace(begun, size=begun.size - 1)
        return entry.begun.group

    def of_group(self, group: str) -> list[tuple[str, Beginning]]:
        """Return the ids and the beginnings of the open trajectories of a group."""
        return [(id, entry.begun) for id, entry in self._open.items() if entry.begun.group == group]

    @property
    def held(self) -> Iterator[tuple[str, float, Beginning, list[Exchange]]]:
        """All that are open: id, time of the last answer, beginning and exchanges; in this order they make it again."""
        for id, entry in self._open.items():
            yield id, entry.touched, entry.begun, entry.exchanges
