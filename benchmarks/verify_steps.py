"""Measure what a step costs that verifies drafts, and what drafts bring of which a known share is right.

    python benchmarks/verify_steps.py --json-out benchmarks/results/verify_steps.json
    python benchmarks/verify_steps.py --shape qwen3-8b --json-out benchmarks/results/verify_steps-8b.json

The engine's loop runs in this process, without HTTP. Each row may say one token only, so that drafts are right or
wrong as the benchmark wants. For each number of rows three loads take turns in each round:

- `off`: no drafts;
- `wrong`: drafts that are all wrong: every step verifies them and brings one token a row, so that off / wrong is the
  time of a step that verifies by the time of a step that decodes (`step_ratio`);
- `right`: each draft is right with the probability `--accept`, as far as those before it are (`speed_up`). As with
  copied drafts, a row waits until its newest token is known.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from partial import Results, stop_cleanly

from mlx_tandem import demo
from mlx_tandem.cli.bench.script import Script, Work, run_script
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.outputs import argument
from mlx_tandem.config import EngineConfig, LoraConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.plan import StepPlan, StepResult
from mlx_tandem.engine.proposers import Asked
from mlx_tandem.engine.proposers import speculation as server_proposer
from mlx_tandem.model.step.compiled import USUAL
from mlx_tandem.types import DraftSource, EngineInfo, Request, SamplingParams, SpeculationStats

LOADS = ("off", "wrong", "right")

WARM_UPS = USUAL + 1
"""Rounds that are not counted. On a GPU, a kind of step with drafts runs USUAL times untraced, perhaps once a round."""


class Known:
    """A proposer that knows what each row says, and errs on purpose."""

    for_all, together, in_steps = True, False, False

    def __init__(self, drafts: int, accept: float):
        self.load = "off"
        self.rows = self.accepted = 0
        self._drafts, self._accept, self._rng = drafts, accept, random.Random(0)

    def is_on(self, rows: int) -> bool:
        """Return whether the present load has drafts."""
        return self.load != "off" and rows > 0

    def needs_newest(self, request: Request, choice: int) -> bool:
        """Return whether rows wait for their newest token, as rows do that accept some of their drafts."""
        return self.load == "right"

    def prepare(self, asked: Sequence[Asked]) -> None:
        """Do nothing: drafts are made row by row."""

    def offer(self, request: Request, choice: int, tokens: int, draft: int) -> None:
        """Do nothing: steps make no drafts."""

    def propose(self, request: Request, choice: int, tokens: Sequence[int], unread: int, most: int) -> Sequence[int]:
        """Return drafts for a row that only ever says one token."""
        (right,) = request.params.allowed_token_ids
        if self.load == "wrong":
            return [right + 1] * min(self._drafts, most)
        return [right + (self._rng.random() >= self._accept) for _ in range(min(self._drafts, most))]

    def source(self, request: Request, choice: int) -> DraftSource | None:
        """Return nothing, since drafts are made up here."""
        return None

    def settle(self, request: Request, choice: int, drafts: int, accepted: int, source: DraftSource | None) -> None:
        """Count a row and its accepted drafts."""
        self.rows += 1
        self.accepted += accepted

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Do nothing: drafts are never turned off."""

    def stats(self) -> SpeculationStats | None:
        """Return nothing."""
        return None

    def forget(self, request: Request, choice: int) -> None:
        """Do nothing: rows have no state."""


class Bench:
    """The rounds of one run."""

    def __init__(self, args: argparse.Namespace, results: Results, proposer: Known):
        self._args, self._results, self._proposer = args, results, proposer
        self._ids = count(1)

    def script(self, info: EngineInfo) -> Script:
        """Run all rounds of each number of rows."""
        found: list[dict[str, Any]] = []
        proposer, args = self._proposer, self._args
        for rows in map(int, args.rows.split(",")):
            rates: dict[str, list[float]] = {load: [] for load in LOADS}
            taken: list[float] = []
            for repeat in range(-WARM_UPS, args.repeats):
                for proposer.load in LOADS[:: -1 if repeat % 2 else 1]:
                    proposer.rows = proposer.accepted = 0
                    tokens = args.max_tokens * (3 if proposer.load == "right" else 1)
                    answers = yield Work([self._submit(row, tokens) for row in range(rows)])
                    assert answers is not None
                    if repeat >= 0:
                        rates[proposer.load].append(answers.timeline.rate(range(rows), tokens))
                        if proposer.load == "right":
                            taken.append(1 + proposer.accepted / max(proposer.rows, 1))
            found.append({"rows": rows} | _summary(rates, taken))
            self._results.add(results=found)
            print({k: v for k, v in found[-1].items() if k != "rounds"}, file=sys.stderr, flush=True)

    def _submit(self, row: int, max_tokens: int) -> m.Submit:
        prompt = tuple(3 + (row + n) % 200 for n in range(self._args.prompt_tokens))
        only = (3 + row,)
        params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True, allowed_token_ids=only)
        return m.Submit(Request(next(self._ids), prompt, params))


def _summary(rates: dict[str, list[float]], taken: list[float]) -> dict[str, Any]:
    """Return the medians of the ratios of each round, and those of the best rounds."""

    def ratios(load: str, base: str) -> list[float]:
        return [a / b for a, b in zip(rates[load], rates[base], strict=True)]

    return {
        "tokens_per_s": {load: round(statistics.median(own), 1) for load, own in rates.items()},
        "step_ratio": round(statistics.median(ratios("off", "wrong")), 3),
        "step_ratio_of_best": round(max(rates["off"]) / max(rates["wrong"]), 3),
        "speed_up": round(statistics.median(ratios("right", "off")), 3),
        "speed_up_of_best": round(max(rates["right"]) / max(rates["off"]), 3),
        "tokens_per_row": round(statistics.median(taken), 2),
        "rounds": {load: [round(rate, 1) for rate in own] for load, own in rates.items()},
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="steps that verify drafts beside steps that decode")
    parser.add_argument("--shape", help="a model of this shape with random weights; by default the demo model")
    parser.add_argument("--rows", default="1,8,16,64")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--accept", type=float, default=0.7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    most = max(map(int, args.rows.split(",")))
    with tempfile.TemporaryDirectory(prefix="tandem-verify-") as scratch:
        model = ModelConfig(path=str(demo.MODEL_PATH))
        if args.shape:
            shape = SHAPES[args.shape]
            drawn = shape.dtype != "float32"
            folder = write_model(Path(scratch) / args.shape, shape, weights=not drawn)
            model = ModelConfig(path=str(folder), random_weights=drawn)
        config = EngineConfig(
            model=model,
            scheduler=SchedulerConfig(max_num_seqs=most * (args.drafts + 1)),
            lora=LoraConfig(max_loras=0),
            speculation=SpeculationConfig(method="ngram", num_tokens=args.drafts),
        )
        results = Results(args.json_out, model=args.shape or "demo", drafts=args.drafts, accept=args.accept)
        proposer = Known(args.drafts, args.accept)
        bench = Bench(args, results, proposer)
        with patch.object(server_proposer, "Speculation", lambda *_: proposer):
            run_script(bench.script, config)
        results.finish()


if __name__ == "__main__":
    main()
