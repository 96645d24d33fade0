"""The memory of completions that feedback may come for: their tokens, for a while and within a number of bytes."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_tandem.config import FeedbackConfig
from mlx_tandem.errors import NotFound
from mlx_tandem.training.ab.running import Judged
from mlx_tandem.types import AdapterRef

OVERHEAD_BYTES = 1024
"""Bytes that are counted for each completion in addition to its tokens."""


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as four bytes each."""
    return array("I", tokens).tobytes()


def unpacked(data: bytes) -> tuple[int, ...]:
    """Return the token ids of `packed`."""
    return tuple(array("I", data))


@dataclass(frozen=True)
class Remembered:
    """One completion. Choice i of prompt k has the number k * n + i; token ids are packed."""

    id: str
    at: float  # Unix seconds
    adapter: AdapterRef | None  # None: the base
    prompts: tuple[bytes, ...]
    choices: tuple[bytes, ...]
    judged: Judged | None = None  # where its score counts in an A/B test
    owner: str = ""  # the tenant that it was made for

    @property
    def size(self) -> int:
        """The number of bytes that it needs."""
        return OVERHEAD_BYTES + sum(map(len, self.prompts)) + sum(map(len, self.choices))

    def prompt_of(self, choice: int) -> bytes:
        """Return the prompt of a choice."""
        return self.prompts[choice // (len(self.choices) // len(self.prompts))]


class Completions:
    """The newest completions, by their ids. It belongs to one event loop."""

    def __init__(self, config: FeedbackConfig, clock: Callable[[], float]):
        """Begin without completions. `clock` returns the time in Unix seconds."""
        self._seconds, self._most_bytes = config.remember_s, int(config.remember_mb * (1 << 20))
        self._clock = clock
        self._known: OrderedDict[str, Remembered] = OrderedDict()
        self._bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether completions are remembered at all."""
        return self._most_bytes > 0

    def remember(
        self,
        id: str,
        adapter: AdapterRef | None,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[Sequence[int]],
        judged: Judged | None = None,
        owner: str = "",
    ) -> None:
        """Remember a completion, and forget those that are too old or for which there is no room any longer."""
        packs = (tuple(map(packed, prompts)), tuple(map(packed, choices)))
        found = Remembered(id, self._clock(), adapter, *packs, judged, owner)
        if found.size > self._most_bytes:
            return
        if id in self._known:
            self._forget(id)
        self._known[id] = found
        self._bytes += found.size
        while self._bytes > self._most_bytes or self._is_old(next(iter(self._known.values()))):
            self._forget(next(iter(self._known)))

    def get(self, id: str, param: str, sees: Callable[[str], bool] = lambda owner: True) -> Remembered:
        """Return a completion whose tenant `sees` accepts.

        Raises NotFound naming `param`, which says how long completions are remembered.
        """
        found = self._known.get(id)
        if found is None or self._is_old(found) or not sees(found.owner):
            most = f"{self._most_bytes / (1 << 20):g} MiB"
            raise NotFound(
                f"completion {id[:64]!a} is unknown or no longer remembered: the newest completions are remembered for "
                f"{self._seconds:g} s (feedback.remember_s), within {most} (feedback.remember_mb), and until the "
                "server is restarted; those with images are not remembered",
                param=param,
                code="completion_not_found",
            )
        return found

    def knows(self, id: str) -> bool:
        """Return whether a completion is remembered."""
        return id in self._known and not self._is_old(self._known[id])

    def _is_old(self, found: Remembered) -> bool:
        return found.at + self._seconds < self._clock()

    def _forget(self, id: str) -> None:
        self._bytes -= self._known.pop(id).size
