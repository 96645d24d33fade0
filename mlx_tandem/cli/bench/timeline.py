"""Records when each row of a batch, or each request of a closed loop, got its tokens, and computes rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from time import perf_counter

from mlx_tandem.cli.bench.stats import spread


class Timeline:
    """The tokens of one batch that starts now. `add` costs a clock reading and an append.

    `steps` has the time of each step, in seconds of perf_counter, and the rows that got a token.
    """

    def __init__(self, batch: int):
        self._batch = batch
        self._start = perf_counter()
        self.steps: list[tuple[float, list[int]]] = []

    def add(self, rows: list[int]) -> None:
        """Note that a step has given one token to each of these rows."""
        self.steps.append((perf_counter(), rows))

    @classmethod
    def of(cls, batch: int, steps: Iterable[list[int]]) -> Timeline:
        """Return the timeline of a batch of `batch` rows that runs `steps`."""
        timeline = cls(batch)
        for rows in steps:
            timeline.add(rows)
        return timeline

    @property
    def tokens(self) -> int:
        """The number of tokens of all rows."""
        return sum(len(rows) for _, rows in self.steps)

    def prefill(self, prompt_tokens: int) -> dict[str, float]:
        """Return the milliseconds until every row had its first token, and the prompt tokens per second until then."""
        waiting = set(range(self._batch))
        for when, rows in self.steps:
            waiting -= set(rows)
            if not waiting:
                took = when - self._start
                return {"prefill_ms": took * 1e3, "prefill_tokens_per_s": prompt_tokens / took}
        raise RuntimeError(f"{len(waiting)} rows got no token")

    def decode(self, max_tokens: int) -> dict[str, float]:
        """Return tokens per second, milliseconds per step, and a row's mean number of tokens before a step, in the
        steady state.

        The steady state begins with the step that gave the last row its first token and ends with the one that gave
        a first row its last. The rates are 0 if there was no such time.
        """
        got = [0] * self._batch
        waiting = self._batch
        begin = end = 0.0
        counted = steps = before = 0
        ended = False
        for when, rows in self.steps:
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

    def rate(self, rows: Collection[int], max_tokens: int) -> float:
        """Return the tokens per second of some rows while all of them run: from the first token of the last row to the
        end of the first row.
        """
        got = dict.fromkeys(rows, 0)
        begin, counted = 0.0, 0
        for when, drawn in self.steps:
            own = [row for row in drawn if row in got]
            if begin:
                counted += len(own)
            for row in own:
                got[row] += 1
            if not begin and min(got.values()) > 0:
                begin = when
            if max(got.values()) == max_tokens:
                return counted / (when - begin)
        raise RuntimeError(f"no row got {max_tokens} tokens")

    def loop(self, max_tokens: int) -> dict[str, float]:
        """Return the figures of the whole run as a client counts them.

        They are tokens per second from the start to the last token, and milliseconds between two tokens of a row.
        """
        got = Counter(row for _, rows in self.steps for row in rows)
        if any(got[row] != max_tokens for row in range(self._batch)):
            raise RuntimeError(f"a request got other than {max_tokens} tokens")
        last: dict[int, float] = {}
        gaps: list[float] = []
        for when, rows in self.steps:
            gaps += [when - last[row] for row in rows if row in last]
            last |= dict.fromkeys(rows, when)
        took = self.steps[-1][0] - self._start
        between = spread(gaps, 1e3)
        return {
            "loop_s": took,
            "loop_tokens_per_s": self.tokens / took,
            "loop_inter_token_p50_ms": between["p50"],
            "loop_inter_token_p99_ms": between["p99"],
        }
