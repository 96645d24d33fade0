"""The search for stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """A search for the first completed stop string. The result does not depend on how the text is cut into pieces.

    `push` returns the text that can no longer belong to a stop string. When a stop string is completed (the longest, if
    several end at the same character), `hit` is set, and the text ends before it, or after it with `include`. While
    `armed` is false, completed stop strings are ignored. Each stop string has an automaton of its own, so the cost for
    a character does not depend on the strings' lengths.
    """

    __slots__ = ("_fails", "_firsts", "_held", "_include", "_states", "_stops", "armed", "hit")

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops = tuple(stops)
        self._include = include
        self.armed = True
        self._fails = tuple(_failure(s) for s in self._stops)
        self._firsts = frozenset(s[0] for s in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Add `text` and return the text that can no longer belong to a stop string."""
        if self.hit is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text  # No stop string begins in this piece.
        buffer = self._held + text
        states = self._states
        for position in range(len(self._held), len(buffer)):
            character = buffer[position]
            done = ""
            for i, stop in enumerate(self._stops):
                state = states[i]
                while state and stop[state] != character:
                    state = self._fails[i][state]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    if self.armed and state > len(done):
                        done = stop
                    state = self._fails[i][state]
                states[i] = state
            if done:
                self.hit = done
                self._held = ""
                return buffer[: position + 1 - (0 if self._include else len(done))]
        cut = len(buffer) - max(states)
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """Return the text that was held back. The text is complete."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held


def _failure(stop: str) -> tuple[int, ...]:
    """Return the failure function of Knuth, Morris and Pratt.

    Entry k is the length of the longest proper prefix of `stop[:k]` that is also its suffix.
    """
    fails = [0, 0]
    state = 0
    for character in stop[1:]:
        while state and stop[state] != character:
            state = fails[state]
        if stop[state] == character:
            state += 1
        fails.append(state)
    return tuple(fails)
