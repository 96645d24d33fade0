"""Fair turns: which turn each waiting request has among those of other clients, by start-time fair queueing.

Every client has one turn a round. The first request of a client that waits for nothing has its turn in the round that
is being served, and each further request in the round after its last one; a request with several choices takes a round
for each of them. So a client with one request is not kept waiting by the five hundred of another. Requests of one
client keep their order, and a single client has the order in which its requests came.
"""

from __future__ import annotations

from msgspec import Struct, field

ROOM = 64
"""Fewest clients in memory before those are forgotten that have no turn to come."""

Priority = tuple[bool, int]
"""The priority of a sequence."""


class _Class(Struct):
    """The turns of the requests of one priority."""

    served: int = 0  # the latest turn that has begun
    next: dict[int, int] = field(default_factory=dict)  # of each client: the turn of its next request


class FairTurns:
    """The turns of all clients, for each priority by itself."""

    def __init__(self) -> None:
        self._classes: dict[Priority, _Class] = {}
        self._clients = 0  # in all classes, at most
        self._room = ROOM
        self._served = 0  # the latest turn that had begun in any class that was forgotten

    def take(self, priority: Priority, client: int, choices: int) -> int:
        """Return the turn of the next request of a client, which has so many choices."""
        own = self._classes.setdefault(priority, _Class(self._served))
        turn = max(own.next.get(client, 0), own.served)
        self._clients += client not in own.next
        own.next[client] = turn + choices
        if self._clients > self._room:
            self._forget()
        return turn

    def begun(self, priority: Priority, turn: int) -> None:
        """Note that a request with this turn has begun."""
        own = self._classes.get(priority)
        if own is not None and turn > own.served:
            own.served = turn

    def left(self, priority: Priority, client: int) -> None:
        """Note that the last waiting request of a client has gone without its turn, so that the next waits for none."""
        own = self._classes.get(priority)
        if own is not None and client in own.next:
            own.next[client] = min(own.next[client], own.served + 1)

    def _forget(self) -> None:
        """Forget the clients whose next turn is in the round that is being served, which is that of any new client.

        There is room for twice as many as are left, so that this is rare.
        """
        for priority, own in list(self._classes.items()):
            own.next = {client: turn for client, turn in own.next.items() if turn > own.served}
            if not own.next:
                self._served = max(self._served, own.served)
                del self._classes[priority]
        self._clients = sum(len(own.next) for own in self._classes.values())
        self._room = max(ROOM, 2 * self._clients)
