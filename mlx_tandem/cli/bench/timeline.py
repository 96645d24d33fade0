"""When each row of a batch got its tokens, and the rates that follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter


class Timeline:
    """One batch that starts now. `add` costs a clock reading and an append."""

    def __init__(self, batch: int):
        self._batch = batch
        self._start = perf_counter()
        self._steps: list[tuple[float, list[int]]] = []

    def add(self, rows: list[int]) -> None:
        """A step has given one token to each of these rows."""
        self._steps.append((perf_counter(), rows))

    @classmethod
    def of(cls, batch: int, steps: Iterable[list[int]]) -> Timeline:
        timeline = cls(batch)
        for rows in steps:
            timeline.add(rows)
        return timeline

    def figures(self, prompt_tokens: int, max_tokens: int) -> dict[str, float]:
        """Decode: tokens per second from the step that gave the last row its first token to the one that gave a
        first row its last, all rows running; 0 when that never was. Prefill: prompt tokens per second up to the first
        of these steps. Total: tokens per second from start to end."""
        got = [0] * self._batch
        waiting = self._batch
        begin = end = 0.0
        counted = 0
        ended = False
        for when, rows in self._steps:
            if not ended and begin:
                counted += len(rows)
                end = when
            for row in rows:
                got[row] += 1
                waiting -= got[row] == 1
                ended = ended or got[row] == max_tokens
            if not waiting and not begin:
                begin = when
        total = sum(got)
        if min(got) != max_tokens:
            raise RuntimeError(f"a row got {min(got)} tokens instead of {max_tokens}")
        return {
            "decode_tokens_per_s": counted / (end - begin) if end > begin else 0.0,
            "prefill_tokens_per_s": prompt_tokens / (begin - self._start),
            "total_tokens_per_s": total / (self._steps[-1][0] - self._start),
        }
