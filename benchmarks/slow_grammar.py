"""Measure what one request with an ambiguous grammar costs the streams of others.

    python benchmarks/slow_grammar.py --json-out benchmarks/results/slow_grammar.json

The engine's loop runs in this process, without HTTP. In each round, so many plain streams run alone (`alone`),
beside a request of 16 choices without a grammar (`free`), beside one with an ordinary grammar (`ordinary`), and beside
one whose grammar can read every text in very many ways (`beside`). When that request ends or fails, another one with a
grammar of its own takes its place. The figures are the times between two tokens of a plain stream.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from time import perf_counter
from typing import Any

from partial import Results, stop_cleanly

from mlx_tandem import demo
from mlx_tandem.cli.bench.script import ScriptChannel, Work
from mlx_tandem.cli.outputs import argument
from mlx_tandem.config import EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.wire import WireError
from mlx_tandem.engine_main import serve
from mlx_tandem.types import EngineInfo, Grammar, Request, SamplingParams

GRAMMARS = {
    "ordinary": "start: /[a-z ]{100,400}/\n",
    "two": 'start: s\ns: s s | "a" | "b" | /[a-z]/\n',
    "three": 'start: s\ns: s s s | s s | /[a-z]/ | ""\n',
    "words": "start: s\ns: s s s | s s | A | B | C\nA: /[a-z]+/\nB: /[a-m]+/\nC: /[k-z ]+/\n",
}
CHOICES = 16


class Channel(ScriptChannel):
    """The script's channel beside attackers, which come one after the other while the script's work is under way."""

    def __init__(self, start: Any):
        super().__init__(start)
        self.attackers: Iterator[Request] | None = None
        self._left = 0  # choices of the present attacker
        self._attacker = -1
        self.ended: list[str] = []

    def receive(self, wait: float) -> list[m.Inbound]:
        """Return messages for the engine."""
        handed = super().receive(wait)
        if self.attackers is not None and not self._left:
            attacker = next(self.attackers)
            self._left, self._attacker = attacker.n, attacker.id
            handed.append(m.Submit(attacker))
        elif self.attackers is None and self._left:
            handed.append(m.Cancel(self._attacker))
            self._left = 0
        return handed

    def send(self, messages: Sequence[m.Inbound | m.Outbound]) -> None:
        """Take messages of the engine."""
        rest: list[m.Inbound | m.Outbound] = []
        for message in messages:
            if isinstance(message, m.Failed) and message.request >= FIRST_ATTACKER:
                self.ended.append(message.message)
                self._left = 0
            elif isinstance(message, m.Output):
                mine = [d for d in message.deltas if d.request >= FIRST_ATTACKER]
                self._left -= sum(d.finish is not None and d.request == self._attacker for d in mine)
                if others := [d for d in message.deltas if d.request < FIRST_ATTACKER]:
                    rest.append(m.Output(others))
            else:
                rest.append(message)
        super().send(rest)


FIRST_ATTACKER = 1_000_000


def attackers(text: str | None, numbers: Iterator[int]) -> Iterator[Request]:
    """Yield requests with grammars that differ, or without any."""
    for number in numbers:
        grammar = None if text is None else Grammar(f"{text}# {number}\n".encode(), "guided_grammar")
        params = SamplingParams(200, temperature=1.0, seed=number, ignore_eos=grammar is None)
        yield Request(number, (5, 6, 7), params, n=CHOICES, grammar=grammar)


class Bench:
    """The rounds of one run."""

    def __init__(self, args: argparse.Namespace, results: Results):
        self._args, self._results, self._ids = args, results, count(1)
        self.channel: Channel | None = None

    def script(self, info: EngineInfo) -> Any:
        """Run all rounds."""
        assert self.channel is not None
        waits: dict[str, list[float]] = {"alone": [], "free": [], "ordinary": [], "beside": []}
        numbers = count(FIRST_ATTACKER)
        loads = {
            "alone": None,
            "free": attackers(None, numbers),
            "ordinary": attackers(GRAMMARS["ordinary"], numbers),
            "beside": attackers(GRAMMARS[self._args.grammar], numbers),
        }
        for repeat in range(-1, self._args.repeats):  # the first is a warm-up
            for load in waits:
                self.channel.attackers = loads[load]
                answers = yield Work([m.Submit(self._plain(row)) for row in range(self._args.rows)])
                if repeat >= 0:
                    waits[load] += _waits(answers.timeline.steps, self._args.rows)
        self.channel.attackers = None
        found = {load: _summary(own) for load, own in waits.items()}
        ratios = {
            load: round(found["beside"]["p99_ms"] / found[load]["p99_ms"], 2) for load in waits if load != "beside"
        }
        self._results.add(grammar=self._args.grammar, **found, p99_ratios=ratios, failed=len(self.channel.ended))
        print(
            found, "p99 ratios", ratios, "attackers that failed", len(self.channel.ended), file=sys.stderr, flush=True
        )

    def _plain(self, row: int) -> Request:
        return Request(
            next(self._ids), (row + 9,) * 8, SamplingParams(self._args.max_tokens, seed=row, ignore_eos=True)
        )


def _waits(steps: list[tuple[float, list[int]]], rows: int) -> list[float]:
    """Return the seconds between every two tokens of each row."""
    last = [0.0] * rows
    found = []
    for when, got in steps:
        for row in got:
            if last[row]:
                found.append(when - last[row])
            last[row] = when
    return found


def _summary(waits: list[float]) -> dict[str, float]:
    ordered = sorted(waits)
    return {
        "median_ms": round(statistics.median(ordered) * 1e3, 2),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 2),
        "most_ms": round(ordered[-1] * 1e3, 2),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="plain streams beside an ambiguous grammar")
    parser.add_argument("--grammar", choices=[*GRAMMARS], default="two")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    config = EngineConfig(
        model=ModelConfig(path=str(demo.MODEL_PATH)),
        scheduler=SchedulerConfig(max_num_seqs=args.rows + CHOICES),
        lora=LoraConfig(max_loras=0),
    )
    results = Results(args.json_out, model="demo", rows=args.rows, max_tokens=args.max_tokens)
    bench = Bench(args, results)
    begun = perf_counter()
    bench.channel = Channel(bench.script)
    with contextlib.suppress(WireError):
        serve(bench.channel, config, False)
    print(f"{perf_counter() - begun:.0f} s", file=sys.stderr)
    results.finish()


if __name__ == "__main__":
    main()
