"""A led rank: it receives the orders of the leading rank and carries them out in sequence on the computing thread."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine.plan import Runner
from mlx_tandem.engine.ranks import messages as g
from mlx_tandem.engine.ranks.channel import ChannelError, RankChannel
from mlx_tandem.engine.ranks.leader import EXIT_GROUP, digest_of

log = logging.getLogger(__name__)

ALIVE_SECONDS = 1.0
"""Seconds between two signs of life."""


class Share(Protocol):
    """The part that a led rank computes: its share of the model, in its runner."""

    @property
    def runner(self) -> Runner:
        """The runner of this rank."""

    def join(self, shapes: tuple[tuple[int, int], ...]) -> str:
        """Connect with the other ranks and check sums of these shapes. Return what is wrong, or an empty string."""

    def prepare(self, weights: AdapterWeights) -> None:
        """Make an adapter ready to be installed; called on another thread than the one that computes."""

    def memory(self) -> int:
        """Return the bytes that this rank uses on its device."""


class Inbox:
    """The orders that have arrived. A thread receives them, so that the end of the leading rank is noticed while this
    rank computes; the process then ends at once.
    """

    def __init__(self, channel: RankChannel[g.Order], end: Callable[[int], None] = os._exit):
        self.channel = channel
        self.adapters: dict[str, AdapterWeights] = {}
        """Adapters by digest, as far as they have arrived."""

        self.prepare: Callable[[AdapterWeights], None] = lambda weights: None
        self._end = end
        self._orders: queue.Queue[g.Order | ChannelError] = queue.Queue()
        self._arriving: dict[str, tuple[g.AdapterShapes, bytearray]] = {}
        for work, name in ((self._receive, "orders"), (self._live, "alive")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def next(self) -> g.Order:
        """Wait for the next order and return it. Raises ChannelError where the leading rank is gone."""
        order = self._orders.get()
        if isinstance(order, ChannelError):
            raise order
        return order

    def _receive(self) -> None:
        try:
            while True:
                order = self.channel.receive()
                if isinstance(order, g.AdapterPart):
                    self._add(order)
                else:
                    self._orders.put(order)
        except ChannelError as e:
            self._end(EXIT_GROUP)
            self._orders.put(e)
        except Exception as e:  # this rank would give signs of life, and take no order any more
            log.exception("an order could not be taken")
            self._end(EXIT_GROUP)
            self._orders.put(ChannelError(f"its order could not be taken ({type(e).__name__})"))

    def _live(self) -> None:
        never = threading.Event()
        while not never.wait(ALIVE_SECONDS):
            try:
                self.channel.send(g.Alive())
            except ChannelError:
                self._end(EXIT_GROUP)
                return

    def _add(self, part: g.AdapterPart) -> None:
        """Add a piece of an adapter. Steps can use the adapter once its last piece has arrived."""
        if part.adapter is not None:
            self._arriving[part.digest] = part.adapter, bytearray()
        if part.digest not in self._arriving:
            raise ChannelError("it sent a piece of an adapter before the first piece")
        shapes, data = self._arriving[part.digest]
        data += part.data
        if len(data) > shapes.nbytes:
            raise ChannelError("it sent more bytes of an adapter than its arrays have")
        if len(data) == shapes.nbytes:
            del self._arriving[part.digest]
            weights = self.adapters[part.digest] = shapes.filled(data)
            self.prepare(weights)


def follow(inbox: Inbox, share: Share) -> None:
    """Carry out the leading rank's orders until the process ends. Raises ChannelError, and the errors of the runner."""
    flights: dict[int, Any] = {}
    launched = 0
    runner = share.runner
    while True:
        order = inbox.next()
        match order:
            case g.Launch():
                plan = order.plan()
                handle = runner.launch(plan)
                if plan.has_step:
                    flights[launched] = handle
                launched += 1
            case g.Wait():
                result = runner.wait(flights.pop(order.launch))
                inbox.channel.send(g.Done(digest_of(result.tokens), tuple(result.saves)))
            case g.Sample():
                runner.sample(flights[order.launch], [[array.read() for array in each] for each in order.numbers])
            case g.Reset():
                flights.clear()
                runner.reset()
            case g.OneAtATime():
                runner.one_at_a_time = order.value
            case g.DropAdapter():
                inbox.adapters.pop(order.digest, None)
            case g.Join():
                inbox.channel.send(g.Joined(share.join(order.shapes)))
            case _:
                raise ChannelError(f"it sent {type(order).__name__} where a step was expected")
