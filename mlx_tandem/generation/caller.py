"""The caller of a request: the name, scopes and limits of its key, and what was used with it.

Everything here is about keys by their names. The keys themselves are known to `server/keyring.py` only, as digests.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from mlx_tandem.errors import Forbidden, Overloaded, TooLarge
from mlx_tandem.generation.ending_rate import EndingRate

Scope = Literal["inference", "adapters", "training", "metrics", "admin"]
"""A permission of a key: to generate and score; to load and remove adapters and aliases; to train and read
what is learned from; to read counters; to pause the server and work with other machines."""

SCOPES: tuple[Scope, ...] = get_args(Scope)

MINUTE = 60.0
"""Seconds of a minute."""

_Requests = Annotated[int, Meta(ge=0, le=1_000_000)]
_Amount = Annotated[int, Meta(ge=0, le=2**40)]


class KeyLimits(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of a key. 0 is no limit."""

    requests: _Requests = 0  # requests that are open at once
    requests_per_minute: _Requests = 0
    queued_tokens: _Amount = 0  # tokens of the prompts and answers (max_tokens) of all open requests
    upload_bytes_per_minute: _Amount = 0  # bytes of request bodies
    adapters: _Requests = 0  # versions of adapters that the key's tenant has registered by requests
    learning: bool = True  # whether answers may be learned from that are given to this key, and feedback that it sends


UNLIMITED = KeyLimits()
"""The limits of a key without any."""


class MinuteWindow:
    """An amount that may be used up within any minute, in steps of a second."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._used: deque[list[float]] = deque()  # of each second: when it was used last, and how much
        self._total = 0.0

    def add(self, amount: float) -> None:
        """Note that this amount was used now."""
        now = self._clock()
        self._total += amount
        if self._used and int(self._used[-1][0]) == int(now):
            self._used[-1] = [now, self._used[-1][1] + amount]
        else:
            self._used.append([now, amount])

    def seconds_until(self, amount: float, most: float) -> float:
        """Return the seconds until this amount fits into `most` within a minute; 0 if it fits now."""
        now = self._clock()
        while self._used and self._used[0][0] <= now - MINUTE:
            self._total -= self._used.popleft()[1]
        over, wait = self._total + amount - most, 0.0
        for last, used in self._used:
            if over <= 0:
                break
            over -= used
            wait = last + MINUTE - now
        return wait


class Use:
    """The use of one key: what is open, what came within the last minute, and counters since the start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.open_requests = 0
        self.open_tokens = 0
        self.requests = 0  # since the start
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.refused: Counter[str] = Counter()  # by the field of the limits
        self.asked = MinuteWindow(clock)
        self.uploaded = MinuteWindow(clock)
        self.ending = EndingRate(clock)
        self.tokens_ending = EndingRate(clock)


@dataclass(frozen=True)
class Caller:
    """Whoever sends a request: the name, tenant, scopes and limits of the key, and what is asked for with it.

    The default is the caller of a server that asks for no key, or for a single one.
    """

    name: str = ""
    tenant: str = ""
    scopes: frozenset[Scope] = frozenset(SCOPES)
    limits: KeyLimits = UNLIMITED
    use: Use = field(default_factory=Use)

    def check_scope(self, scope: Scope, what: str) -> None:
        """Raise Forbidden unless the key has `scope`, which `what` needs."""
        if scope not in self.scopes:
            raise Forbidden(f"the key '{self.name}' lacks the scope {scope}, which {what} needs", code="missing_scope")

    def sees(self, owner: str) -> bool:
        """Return whether the caller sees what belongs to the tenant `owner`; with the scope admin it sees all."""
        return self.tenant == owner or "admin" in self.scopes

    def check_request(self) -> None:
        """Raise Overloaded if as many requests are open, or came within this minute, as the key may send."""
        use, limits = self.use, self.limits
        if 0 < limits.requests <= use.open_requests:
            raise self._over("requests", limits.requests, "requests are open", use.ending.seconds_for(1.0))
        most = limits.requests_per_minute
        if most and (wait := use.asked.seconds_until(1, most)):
            raise self._over("requests_per_minute", most, "requests came within a minute", wait)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while the block runs."""
        use = self.use
        if self.limits.requests_per_minute:
            use.asked.add(1)
        use.requests += 1
        use.open_requests += 1
        use.ending.began()
        try:
            yield
        finally:
            use.open_requests -= 1
            use.ending.ended()

    @contextmanager
    def tokens(self, amount: int) -> Iterator[None]:
        """Count the most tokens of a request that generates, while the block runs. Raises TooLarge for one that has
        more than may ever be open, and Overloaded if too many are open now.
        """
        use, most = self.use, self.limits.queued_tokens
        over = use.open_tokens + amount - most
        if 0 < most < amount:
            raise TooLarge(
                f"the request has up to {amount} tokens, and the key '{self.name}' may have {most} open "
                "(its limit queued_tokens)"
            )
        if most and over > 0:
            wait = use.tokens_ending.seconds_for(over, first=use.open_tokens / use.tokens_ending.open)
            raise self._over("queued_tokens", most, f"tokens may be open, and {amount} more are asked for", wait)
        use.open_tokens += amount
        use.tokens_ending.began()
        try:
            yield
        finally:
            use.open_tokens -= amount
            use.tokens_ending.ended(amount)

    def upload(self, size: int) -> None:
        """Count the bytes of a body. Raises TooLarge for more than a minute may have, and Overloaded for more than are
        left of this minute.
        """
        use, most = self.use, self.limits.upload_bytes_per_minute
        if not most:
            return
        if size > most:
            raise TooLarge(
                f"the body has {size} bytes, and the key '{self.name}' may send {most} a minute "
                "(its limit upload_bytes_per_minute)"
            )
        if wait := use.uploaded.seconds_until(size, most):
            raise self._over("upload_bytes_per_minute", most, f"bytes may come within a minute, {size} more came", wait)
        use.uploaded.add(size)

    def check_learning(self) -> None:
        """Raise Forbidden if nothing may be learned from this key's requests."""
        if not self.limits.learning:
            raise Forbidden(
                f"nothing may be learned from requests of the key '{self.name}' (its limit learning)",
                code="missing_scope",
            )

    def _over(self, limit: str, most: int, what: str, wait: float) -> Overloaded:
        """Count a refusal and return its error."""
        self.use.refused[limit] += 1
        return Overloaded(f"{most} {what}, the most for the key '{self.name}' (its limit {limit})", retry_after=wait)


ANYONE = Caller()
"""The caller of requests for which no named key was shown, on a server that lets them do everything."""

CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)
"""Whoever sent the request that is being handled."""
