"""Measures one streamed request: when each event came, and what the server reported at the end."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any

_EVENT = b'data: {"'  # cannot occur inside a JSON string, where the quote would be escaped
_TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning)": ?"[^"]')


class Stream:
    """One streamed reply; call it with each piece of the body.

    A piece costs a count and an append; everything else waits for `finish`. With `keep` the pieces are kept for
    `answer`.
    """

    __slots__ = (
        "_kept",
        "_last",
        "_rest",
        "counts",
        "error",
        "finished",
        "problem",
        "prompt_tokens",
        "retry_after",
        "sent",
        "silent",
        "times",
        "tokens",
    )

    def __init__(self, keep: bool = False) -> None:
        self.sent = perf_counter()
        self.finished = 0.0
        self.times: list[float] = []  # arrival of each piece with events, from the first one that carries text
        self.counts: list[int] = []  # number of events in each of these pieces
        self.silent = 0  # events before the first text (a role, for example)
        self.tokens = 0
        self.prompt_tokens = 0
        self.error: str | None = None  # the error in the server's words
        self.problem: str | None = None  # the kind of the error: a status, or a word
        self.retry_after: str | None = None  # the Retry-After header of a refusal
        self._kept: list[bytes] | None = [] if keep else None
        self._rest = b""
        self._last: deque[bytes] = deque(maxlen=6)

    def __call__(self, piece: bytes) -> None:
        """Take a piece of the body."""
        now = perf_counter()
        if self._kept is not None:
            self._kept.append(piece)
        if self._rest:
            piece = self._rest + piece
            self._rest = b""
        if not piece.endswith(b"\n\n"):
            cut = piece.rfind(b"\n\n") + 2
            if cut == 1:  # no event is complete yet
                self._rest = piece
                return
            piece, self._rest = piece[:cut], piece[cut:]
        n = piece.count(_EVENT)
        self._last.append(piece)
        if not self.times and not _TEXT.search(piece):
            self.silent += n
        elif n:
            self.times.append(now)
            self.counts.append(n)

    def fail(self, problem: str, error: str) -> None:
        """Note that the request ended without a whole answer."""
        self.finished = self.finished or perf_counter()
        self.problem, self.error = problem, error

    def finish(self, status: int, retry_after: str | None = None) -> None:
        """End the stream: read the usage and errors from the last pieces of the body."""
        self.finished = perf_counter()
        tail = b"".join(self._last) + self._rest
        if status != 200:
            self.retry_after = retry_after
            return self.fail(str(status), f"{status} {tail[:200].decode(errors='replace')}")
        events = [event[6:] for event in tail.split(b"\n\n") if event.startswith(b"data: ")]
        if events and events[-1] == b"[DONE]":
            events.pop()
        else:
            self.fail("cut off", "the stream ended without [DONE]")
        textless = 0  # events without text at the end, such as a finish reason or the usage
        for event in events:
            data = json.loads(event)
            if "error" in data:
                self.fail("error event", str(data["error"])[:200])
            if usage := data.get("usage"):
                self.tokens = usage["completion_tokens"]
                self.prompt_tokens = usage["prompt_tokens"]
            textless = 0 if _TEXT.search(event) else textless + 1
        self._drop_last(textless)
        self.tokens = self.tokens or self.events
        if self.problem is None and not self.events:
            self.fail("no token", "no token came")

    def answer(self) -> tuple[str, list[int] | None]:
        """Return the text of a kept stream, and its token ids if the server sent them."""
        text: list[str] = []
        ids: list[int] = []
        for choice in self.choices():
            text.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            ids += choice.get("token_ids") or []
        return "".join(text), ids or None

    def choices(self) -> Iterator[dict[str, Any]]:
        """Yield the choices of each event of a kept stream, as the server sent them."""
        for event in b"".join(self._kept or []).split(b"\n\n"):
            if event.startswith(_EVENT):
                yield from json.loads(event[6:]).get("choices", ())

    def _drop_last(self, events: int) -> None:
        while events and self.counts:
            taken = min(events, self.counts[-1])
            self.counts[-1] -= taken
            events -= taken
            if not self.counts[-1]:
                self.counts.pop()
                self.times.pop()

    @property
    def events(self) -> int:
        """The number of events that carried text."""
        return sum(self.counts)

    @property
    def refused(self) -> bool:
        """Whether the server had no room for the request."""
        return self.problem in ("429", "503")

    @property
    def first(self) -> float:
        """Seconds until the first event with text."""
        return self.times[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds until the end of the reply."""
        return self.finished - self.sent

    def gaps(self) -> list[float]:
        """Return the seconds between consecutive events; events that came in one piece are 0 apart."""
        gaps: list[float] = []
        for i, count in enumerate(self.counts):
            if i:
                gaps.append(self.times[i] - self.times[i - 1])
            gaps += [0.0] * (count - 1)
        return gaps
