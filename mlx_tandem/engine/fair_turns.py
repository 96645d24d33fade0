"""Fair turns: which turn each waiting request has among those of other clients, by start-time fair queueing.

A turn is a number of tokens. The first request of a client that waits for nothing has the turn that is being served,
and each further request a turn that is later by the tokens of the one before it: those of its prompt, and for each
choice as many as the client's answers have had lately. So all clients get the same number of tokens while they wait,
and one with one request is not kept waiting by the five hundred of another. Requests of one client keep their order,
and a single client has the order in which its requests came.

Prompts that are being read at the same time are read in an order that is fair in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct, field

from mlx_tandem.engine.sequence import Sequence

ROOM = 64
"""Fewest clients in memory before those are forgotten that have no turn to come."""

MOST = 4096
"""Most clients in memory after some were forgotten, since a client may say that it is another one each time."""

SHARE_OF_NEWEST = 0.1
"""Weight of the newest answer in the moving average of the length of a client's answers, 0 to 1."""

Priority = tuple[bool, int]
"""The priority of a sequence."""


class _Class(Struct):
    """The turns of the requests of one priority."""

    served: int = 0  # the latest turn that has begun
    next: dict[int, int] = field(default_factory=dict)  # of each client: the turn of its next request
    newest: dict[int, int] = field(default_factory=dict)  # of each client: the turn of its newest request


class FairTurns:
    """The turns of all clients, for each priority by itself."""

    def __init__(self) -> None:
        self._classes: dict[Priority, _Class] = {}
        self._clients = 0  # in all classes, at most
        self._room = ROOM
        self._served = 0  # the latest turn that had begun in any class that was forgotten
        self._answers: dict[int, float] = {}  # mean number of tokens of each client's answers

    def has_several(self, priority: Priority) -> bool:
        """Return whether several clients are known at this priority."""
        own = self._classes.get(priority)
        return own is not None and len(own.next) > 1

    def answer(self, s: Sequence) -> int:
        """Return about how many tokens a choice of the request of `s` will have."""
        most = s.most_tokens - s.prompt_length
        return int(min(self._answers.get(s.request.client, most), most))

    def answered(self, priority: Priority, client: int, charged: int, tokens: int) -> None:
        """Note that an answer to a client has ended with so many tokens. Its turn was charged for `charged`; the next
        one pays the difference, or is given it.
        """
        own = self._classes.get(priority)
        if own is not None and client in own.next:
            own.next[client] = max(own.next[client] + tokens - charged, own.newest[client], own.served)
        mean = self._answers.get(client, tokens)
        self._answers[client] = mean + SHARE_OF_NEWEST * (tokens - mean)
        if len(self._answers) > 2 * self._room:
            known = {client for own in self._classes.values() for client in own.next}
            self._answers = {client: mean for client, mean in self._answers.items() if client in known}

    def take(self, priority: Priority, client: int, cost: int) -> int:
        """Return the turn of the next request of a client, which has this cost."""
        own = self._classes.setdefault(priority, _Class(self._served))
        turn = max(own.next.get(client, 0), own.served)
        self._clients += client not in own.next
        own.next[client] = turn + cost
        own.newest[client] = turn
        if self._clients > self._room:
            self._forget()
        return turn

    def begun(self, priority: Priority, turn: int) -> None:
        """Note that a request with this turn has begun."""
        own = self._classes.get(priority)
        if own is not None and turn > own.served:
            own.served = turn

    def left(self, priority: Priority, client: int, cost: int) -> None:
        """Note that the last waiting request of a client, of this cost, has gone without its turn. The next one waits
        as if it had been the only one.
        """
        own = self._classes.get(priority)
        if own is not None and client in own.next:
            own.next[client] = min(own.next[client], own.served + cost)
            own.newest[client] = min(own.newest[client], own.next[client])

    def _forget(self) -> None:
        """Forget the clients whose next turn is in the round that is being served, which is that of any new client, and
        of more than MOST those with the fewest tokens to wait for.

        There is room for twice as many as are left, so that this is rare.
        """
        ahead = [turn - own.served for own in self._classes.values() for turn in own.next.values()]
        least = max(sorted(ahead)[-MOST], 0) if len(ahead) > MOST else 0
        for priority, own in list(self._classes.items()):
            own.next = {client: turn for client, turn in own.next.items() if turn - own.served > least}
            own.newest = {client: own.newest[client] for client in own.next}
            if not own.next:
                self._served = max(self._served, own.served)
                del self._classes[priority]
        self._clients = sum(len(own.next) for own in self._classes.values())
        self._room = max(ROOM, 2 * self._clients)


class ReadingOrder:
    """The order in which prompts are read: at each priority, first those of the client of which least was read.

    Only what is read while several clients have prompts counts. A client that joins them is the first of them.
    """

    def __init__(self) -> None:
        self._read: dict[int, int] = {}  # tokens by client

    def of(self, reading: list[Sequence]) -> list[Sequence]:
        """Return the sequences in the order in which their prompts are to be read."""
        clients = {s.request.client for s in reading}
        if len(clients) < 2:
            self._read = {}
            return reading
        before = self._read
        first = min((before[client] for client in clients if client in before), default=1) - 1
        self._read = read = {client: before.get(client, first) for client in clients}
        return sorted(reading, key=lambda s: (s.priority, read[s.request.client]))

    def took(self, client: int, tokens: int) -> None:
        """Note that so many tokens of a client's prompt are read."""
        if client in self._read:
            self._read[client] += tokens


def absent_clients(waiting: list[Sequence], running: Iterable[Sequence]) -> set[int]:
    """Return the ids of the first waiting sequence of each client that has none running, at the highest priority."""
    present = {s.request.client for s in running}
    found = set[int]()
    for s in waiting:
        if s.priority != waiting[0].priority or s.request.background:
            break
        if s.request.client not in present:
            present.add(s.request.client)
            found.add(s.id)
    return found


def surplus_for(s: Sequence, running: list[Sequence], free: int) -> Sequence | None:
    """Return the last running sequence of the client with most, in whose place `s` may run; None if there is none.

    The client of `s` has none running. `free`: number of seats without a sequence. Once it has given up all seats that
    `s` needs, the client with most still has as many. Where blocks are missing, it still has as many tokens without
    this sequence as `s` has. Nothing more important than `s` goes.
    """
    seats, tokens = Counter[int](), Counter[int]()
    for x in running:
        seats[x.request.client] += 1 + len(x.siblings)
        tokens[x.request.client] += x.total
    if s.request.client in seats:
        return None
    client, _ = seats.most_common(1)[0]
    victim = next(x for x in reversed(running) if x.request.client == client)
    needed = 1 + len(s.siblings)
    spares_seats, spares_tokens = seats[client] + free >= 2 * needed, tokens[client] - victim.total >= s.total
    has_surplus = spares_seats if needed > free else spares_tokens
    return victim if has_surplus and victim.priority >= s.priority else None
