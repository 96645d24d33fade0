"""When each row of a batch, or each request of a closed loop, got its tokens, and the rates that follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from time import perf_counter

from mlx_tandem.cli.bench.stats import spread


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

    @property
    def tokens(self) -> int:
        return sum(len(rows) for _, rows in self._steps)

    def prefill(self, prompt_tokens: int) -> dict[str, float]:
        """Milliseconds until every row had its first token, and tokens of all prompts per second up to there."""
        waiting = set(range(self._batch))
        for when, rows in self._steps:
            waiting -= set(rows)
            if not waiting:
                took = when - self._start
                return {"prefill_ms": took * 1e3, "prefill_tokens_per_s": prompt_tokens / took}
        raise RuntimeError(f"{len(waiting)} rows got no token")

    def decode(self, max_tokens: int) -> dict[str, float]:
        """The steady state: from the step that gave the last row its first token to the one that gave a first row its
        last. Tokens per second and milliseconds a step in it, 0 when it never was, and how many tokens a row had got
        before a step, on average."""
        got = [0] * self._batch
        waiting = self._batch
        begin = end = 0.0
        counted = steps = before = 0
        ended = False
        for when, rows in self._steps:
            if begin and not ended:
                counted += len(rows)
                before += sum(got[row] for row in rows)
                steps += 1
                end = when
            for row in rows:
                got[row] += 1
                waiting -= got[row] == 1
                ended = ended or got[row] == max_tokens
            if not waiting and not begin:
                begin = when
        if min(got) != max_tokens:
            raise RuntimeError(f"a row got {min(got)} tokens instead of {max_tokens}")
        return {
            "decode_tokens_per_s": counted / (end - begin) if end > begin else 0.0,
            "step_ms": (end - begin) * 1e3 / steps if steps else 0.0,
            "generated_before": before / counted if counted else 0.0,
        }

    def loop(self, max_tokens: int) -> dict[str, float]:
        """All of it, as the client of a server counts: tokens per second from the start to the last token, and
        milliseconds between two tokens of a row."""
        got = Counter(row for _, rows in self._steps for row in rows)
        if any(got[row] != max_tokens for row in range(self._batch)):
            raise RuntimeError(f"a request got other than {max_tokens} tokens")
        last: dict[int, float] = {}
        gaps: list[float] = []
        for when, rows in self._steps:
            gaps += [when - last[row] for row in rows if row in last]
            last |= dict.fromkeys(rows, when)
        took = self._steps[-1][0] - self._start
        between = spread(gaps, 1e3)
        return {
            "loop_s": took,
            "loop_tokens_per_s": self.tokens / took,
            "loop_inter_token_p50_ms": between["p50"],
            "loop_inter_token_p99_ms": between["p99"],
        }
