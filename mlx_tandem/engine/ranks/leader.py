"""The leading rank's side of a group: it sends each step to the other ranks, compares the tokens that they draw, and
ends the group when one of them fails.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.config import EngineConfig
from mlx_tandem.engine.ranks import messages as g
from mlx_tandem.engine.ranks.channel import ChannelError, RankChannel, encode
from mlx_tandem.errors import GroupFailed, ModelError

log = logging.getLogger(__name__)

EXIT_GROUP = 71
"""Exit status of a rank whose group has ended, upon which the supervisor starts another group."""

PIECE_BYTES = 1 << 20
"""Bytes of an adapter in one message, so that a step's message never waits for long behind it."""

GRACE_SECONDS = 1.0
"""Seconds that the computing thread has to notice that the group has ended. After them the process ends, since that
thread waits for a rank that is gone."""

WATCH_SECONDS = 0.5
"""Seconds between two checks of when each rank was last heard."""

TokenRows = Sequence[tuple[int, ...]]
"""The tokens that a step's rows have drawn."""


def digest_of(tokens: TokenRows) -> bytes:
    """Return the digest by which ranks compare what a step's rows have drawn."""
    return hashlib.blake2b(encode([list(row) for row in tokens]), digest_size=8).digest()


class Process(Protocol):
    """The process of a rank on this machine."""

    def kill(self) -> None:
        """End it now."""


class LedRank:
    """A led rank as the leading rank sees it: its number, its connection, and its answers."""

    def __init__(self, number: int, channel: RankChannel[g.Answer]):
        self.number = number
        self.channel = channel
        self.heard = time.monotonic()
        self.loaded: g.Loaded | None = None
        self.joined: g.Joined | None = None
        self.uncompared: deque[bytes] = deque()
        """Digests of tokens of this rank that the leading rank has not compared yet."""

        self.saves: deque[tuple[bytes, ...]] = deque()
        """Parts of the blocks that steps have saved, which the leading rank has not taken yet."""


class RankLeader:
    """The group as its first rank sees it. One thread computes; any thread may `offer` an adapter."""

    def __init__(
        self,
        followers: Sequence[LedRank],
        *,
        silence_seconds: float,
        wake: Callable[[], None] = lambda: None,
        die: Callable[[int], None] = os._exit,
    ):
        """Begin to listen to the followers.

        Args:
            followers: The other ranks, which are connected.
            silence_seconds: A rank that is silent for longer has failed.
            wake: Called when the group has ended, to wake a thread that waits for messages and then calls `check`.
            die: Ends this process at once with a status.
        """
        self.followers = followers
        self._silence_seconds = silence_seconds
        self._wake, self._die = wake, die
        self._changed = threading.Condition()
        self._failure: GroupFailed | ModelError | None = None
        self._noticed = threading.Event()  # by the thread that computes
        self._closing = False
        self._expected: dict[int, deque[bytes]] = {each.number: deque() for each in followers}
        self._offered: set[str] = set()
        self._installed: set[str] = set()
        self._offering = threading.Lock()
        for each in followers:
            threading.Thread(target=self._listen, args=(each,), name=f"rank-{each.number}", daemon=True).start()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 + len(self.followers)

    @property
    def is_over(self) -> bool:
        """Whether the group has ended."""
        return self._failure is not None

    # -- The start ------------------------------------------------------------------------------------------------

    def begin(self, config: EngineConfig) -> None:
        """Have each rank load its share of the weights, and return at once. Raises GroupFailed."""
        self.tell(g.Begin(config))

    def decide(self, decided: g.Decided) -> None:
        """Tell the ranks what was decided, and wait until each has its share of the weights and its pool.

        Raises:
            ModelError: A rank cannot serve its share.
            GroupFailed: A rank has ended.
        """
        self.tell(decided)
        self._wait_until(lambda each: each.loaded is not None)

    def join(self, shapes: tuple[tuple[int, int], ...], connect: Callable[[], str]) -> None:
        """Have all ranks connect and check their sums; `connect` does it here and returns what is wrong.

        Raises:
            ModelError: A sum is wrong on some rank.
            GroupFailed: A rank has ended, or cannot be connected.
        """
        self.tell(g.Join(shapes))
        problem = connect()
        self._wait_until(lambda each: each.joined is not None)
        for each in self.followers:
            problem = problem or (each.joined.problem if each.joined is not None else "")
        if problem:
            raise ModelError(f"the ranks cannot compute together: {problem}", param="distributed_mode")

    def _wait_until(self, is_so: Callable[[LedRank], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or all(map(is_so, self.followers)))
        self.check()

    # -- Steps ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that has ended the group, if it has ended."""
        if self._failure is not None:
            self._noticed.set()
            raise self._failure

    def tell(self, order: g.Order) -> None:
        """Send an order to all ranks. Raises GroupFailed."""
        self.check()
        body = encode(order)
        self._send([body] * len(self.followers))

    def tell_each(self, orders: Sequence[g.Order]) -> None:
        """Send each rank an order of its own. Raises GroupFailed."""
        self.check()
        self._send([encode(order) for order in orders])

    def _send(self, bodies: Sequence[bytes]) -> None:
        for each, body in zip(self.followers, bodies, strict=True):
            try:
                each.channel.send_encoded(body)
            except ChannelError as e:
                self._fail(GroupFailed(f"rank {each.number}: {e}"))
                self.check()

    def compare(self, tokens: TokenRows) -> None:
        """Compare what this rank has drawn in a step with what the others say of the same step, now or later."""
        own = digest_of(tokens)
        with self._changed:
            for each in self.followers:
                self._expected[each.number].append(own)
                self._compare(each)
        self.check()

    def joined_saves(self, own: Sequence[bytes]) -> list[bytes]:
        """Wait for the other ranks' parts of the blocks that a step has saved, and return the whole blocks.

        `own` are the first rank's parts. Raises GroupFailed.
        """
        self._wait_until(lambda each: bool(each.saves))
        with self._changed:
            others = [each.saves.popleft() for each in self.followers]
        return [b"".join(parts) for parts in zip(own, *others, strict=True)]

    def _compare(self, follower: LedRank) -> None:
        """Compare the digests that both sides have."""
        expected = self._expected[follower.number]
        while expected and follower.uncompared:
            if expected.popleft() != follower.uncompared.popleft():
                self._fail(GroupFailed(f"rank {follower.number} has drawn other tokens than the first rank"))

    def failed(self, problem: str) -> GroupFailed:
        """Note that this rank cannot go on, and return the error to raise."""
        failure = GroupFailed(problem)
        self._noticed.set()
        self._fail(failure)
        return failure

    # -- Adapters -------------------------------------------------------------------------------------------------

    def offer(self, weights: AdapterWeights) -> None:
        """Send an adapter to all ranks, unless they have it. Raises GroupFailed."""
        with self._offering:
            digest = weights.info.digest
            if digest in self._offered:
                return
            shapes: g.AdapterShapes | None = g.AdapterShapes.of(weights)
            for data in _pieces(weights):
                self.tell(g.AdapterPart(digest, data, shapes))
                shapes = None
            self._offered.add(digest)

    def forget_all_but(self, kept: Collection[str]) -> None:
        """Have the ranks forget adapters that have left this rank's memory. `kept`: the digests of those in it.

        An adapter that was offered and has not come into memory yet stays.
        """
        with self._offering:
            for digest in self._installed.difference(kept):
                self.tell(g.DropAdapter(digest))
                self._offered.discard(digest)
            self._installed = self._offered.intersection(kept)

    # -- Listening ------------------------------------------------------------------------------------------------

    def _listen(self, follower: LedRank) -> None:
        """Receive the answers of a led rank until its connection ends."""
        while True:
            try:
                answer = follower.channel.receive()
            except ChannelError as e:
                self._fail(GroupFailed(f"rank {follower.number}: {e}"))
                return
            with self._changed:
                follower.heard = time.monotonic()
                match answer:
                    case g.Loaded():
                        follower.loaded = answer
                    case g.Joined():
                        follower.joined = answer
                    case g.Done():
                        follower.uncompared.append(answer.tokens)
                        if answer.saves:
                            follower.saves.append(answer.saves)
                        self._compare(follower)
                    case g.Failed():
                        text = f"rank {follower.number}: {answer.message}"
                        refused = answer.code and answer.code != GroupFailed.code
                        self._fail(
                            ModelError(text, param=answer.param, code=answer.code) if refused else GroupFailed(text)
                        )
                        return
                self._changed.notify_all()

    def _watch(self) -> None:
        """Check when each rank was last heard. Once the group has ended, wake the computing thread, and end this
        process if that thread does not notice.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None or self._closing, WATCH_SECONDS)
                if self._closing:
                    return
            if self._failure is not None:
                self._wake()
                if not self._noticed.wait(GRACE_SECONDS):
                    self._die(EXIT_GROUP)
                return
            for each in self.followers:
                silent = time.monotonic() - each.heard
                if silent > self._silence_seconds:
                    self._fail(GroupFailed(f"rank {each.number} gives no sign of life for {silent:.0f} s"))

    def _fail(self, failure: GroupFailed | ModelError) -> None:
        """End the group, unless it has ended or is being closed."""
        with self._changed:
            if self._failure is None and not self._closing:
                log.error("the group of %d ranks ends: %s", self.size, failure)
                self._failure = failure
            self._changed.notify_all()

    def close(self) -> None:
        """End the connections, upon which the other ranks end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for each in self.followers:
            each.channel.close()


def _pieces(weights: AdapterWeights) -> list[bytes]:
    """Return the bytes of an adapter's arrays in pieces; at least one."""
    whole = b"".join(half.tobytes() for pair in weights.tensors.values() for half in pair)
    return [whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES)] or [b""]
