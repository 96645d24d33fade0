"""Measure the engine's decode steps, and how much of a step each kernel takes on a GPU.

    python benchmarks/step_kernels.py --shape qwen3.5-9b --rows 1,16,64 --json-out benchmarks/results/step_kernels.json

The engine's loop runs in this process, without HTTP. For each number of rows the milliseconds of a step are the median
of the rounds, while all rows decode greedily. One more round runs under PyTorch's profiler, which sees the kernels of
every library in the process. Without PyTorch or an NVIDIA GPU, no kernels are listed. The listed kernels include those
of the round's prompts, and the profiler slows the steps of its round down.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from partial import Results, stop_cleanly

from mlx_tandem.cli.bench.hybrid_shape import HYBRIDS
from mlx_tandem.cli.bench.script import Script, Work, run_script
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.outputs import argument
from mlx_tandem.config import EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.types import EngineInfo, Request, SamplingParams

NAME = 80
"""Characters of a kernel's name that are kept."""


class Kernels:
    """The kernels that run on an NVIDIA GPU between `start` and `stop`."""

    def __init__(self) -> None:
        try:
            from torch import profiler
        except ImportError:
            self._profile: Any = None
        else:
            self._profile = profiler.profile(activities=[profiler.ProfilerActivity.CUDA])

    def start(self) -> None:
        """Begin to listen."""
        if self._profile is not None:
            self._profile.start()

    def stop(self, steps: int, most: int) -> list[dict[str, Any]]:
        """Return the `most` kernels that took longest, with the milliseconds and the number of runs of each per step.

        steps: the number of steps since `start`.
        """
        if self._profile is None:
            return []
        self._profile.stop()
        took, times = Counter[str](), Counter[str]()
        for event in self._profile.profiler.kineto_results.events():
            if str(event.device_type()).endswith("CUDA"):
                took[event.name()[:NAME]] += event.duration_ns()
                times[event.name()[:NAME]] += 1
        return [
            {"kernel": name, "ms": round(ns / 1e6 / steps, 4), "times": round(times[name] / steps, 1)}
            for name, ns in took.most_common(most)
        ]


class Bench:
    """The rounds of one run."""

    def __init__(self, args: argparse.Namespace, results: Results):
        self._args, self._results = args, results
        self._ids = count(1)

    def script(self, info: EngineInfo) -> Script:
        """Run all rounds of each number of rows."""
        args, found = self._args, list[dict[str, Any]]()
        for rows in args.rows:
            yield self._work(rows)  # steps are compiled
            rates = []
            for _ in range(args.repeats):
                answers = yield self._work(rows)
                assert answers is not None
                rates.append(answers.timeline.rate(range(rows), args.max_tokens))
            kernels = Kernels()
            kernels.start()
            yield self._work(rows)
            step = [round(1e3 * rows / rate, 3) for rate in rates]
            found.append({"rows": rows, "step_ms": statistics.median(step), "rounds": step})
            print(found[-1], flush=True)
            found[-1]["kernels"] = kernels.stop(args.max_tokens, args.most)
            self._results.add(device=info.device, attention=info.attention_backend, results=found)

    def _work(self, rows: int) -> Work:
        """Return the requests of one round. All rounds have the same prompts."""
        prompt = [tuple(3 + (row + n) % 200 for n in range(self._args.prompt_tokens)) for row in range(rows)]
        params = SamplingParams(self._args.max_tokens, temperature=0.0, ignore_eos=True)
        return Work([m.Submit(Request(next(self._ids), own, params)) for own in prompt])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="decode steps and their kernels")
    parser.add_argument("--shape", choices=[*SHAPES, *HYBRIDS], default="4m")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default="1,16,64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--most", type=int, default=40, help="kernels that are listed")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    shape = SHAPES.get(args.shape) or HYBRIDS[args.shape]
    drawn = shape.dtype != "float32"
    with tempfile.TemporaryDirectory(prefix="tandem-kernels-") as scratch:
        folder = write_model(Path(scratch) / args.shape, shape, weights=not drawn)
        config = EngineConfig(
            ModelConfig(path=str(folder), random_weights=drawn),
            scheduler=SchedulerConfig(max_num_seqs=max(args.rows)),
            lora=LoraConfig(max_loras=0),
        )
        results = Results(args.json_out, model=args.shape, max_tokens=args.max_tokens)
        run_script(Bench(args, results).script, config)
        results.finish()


if __name__ == "__main__":
    main()
