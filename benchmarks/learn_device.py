"""Measure learning on one device without HTTP: the agreement of trainer and sampler, and what each costs the other.

    python benchmarks/learn_device.py --json-out benchmarks/results/learn_device-cpu.json
    python benchmarks/learn_device.py --shape qwen3-8b --dtype bfloat16 --seconds 40

An adapter is trained a little, so that it differs from the base, and published. Completions that it then samples are
given to the trainer, whose logprobs should be the same. Then streams run for a while alone and for a while beside
updates of about 2,048 tokens, each stepped and published.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from mlx_tandem import demo
from mlx_tandem.api import Engine
from mlx_tandem.api.trainer import Trainer
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.bench.stats import spread
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.engine.learning import Datum

PROMPT, COMPLETION = 32, 96
RATE = 1e-4


@dataclass
class Streams:
    """Threads that read one stream after the other until a time."""

    engine: Engine
    count: int
    adapter: str | None = None  # adapter of every second stream
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    def run(self, seconds: float, beside: Any) -> dict[str, Any]:
        """Return tokens per second and the milliseconds between tokens, while `beside` is called again and again."""
        self.tokens, self.gaps = 0, []
        before, began = self.engine.stats, perf_counter()
        until = began + seconds
        threads = [threading.Thread(target=self._read, args=(i, until)) for i in range(self.count)]
        for thread in threads:
            thread.start()
        calls = 0
        while perf_counter() < until:
            if beside is None:
                break
            beside()
            calls += 1
        for thread in threads:
            thread.join()
        took = perf_counter() - began
        after = self.engine.stats
        serving, training = after.serving_ms - before.serving_ms, after.training_ms - before.training_ms
        return {
            "tokens_per_s": round(self.tokens / took, 1),
            "inter_token_ms": spread(self.gaps, 1e3),
            "updates_per_minute": round(60 * calls / took, 2),
            "training_share": round(training / (serving + training), 4) if serving + training else 0.0,
        }

    def _read(self, seed: int, until: float) -> None:
        rng = random.Random(seed)
        while perf_counter() < until:
            last = 0.0
            for _ in self.engine.stream(
                prompt_of(rng, self.engine),
                adapter=self.adapter if seed % 2 else None,
                max_tokens=COMPLETION,
                ignore_eos=True,
                temperature=1.0,
            ):
                now = perf_counter()
                if last:
                    self.gaps.append(now - last)
                last = now
                self.tokens += 1


def prompt_of(rng: random.Random, engine: Engine) -> list[int]:
    """Return a random prompt."""
    return [rng.randrange(3, engine.info.vocab_size - 300) for _ in range(PROMPT)]


def sampled(engine: Engine, adapter: str | None, count: int, seed: int) -> tuple[list[Datum], list[list[float]]]:
    """Return completions as data with alternating advantages, and the sampler's own logprobs of them at temperature
    1.
    """
    rng = random.Random(seed)
    prompts = [prompt_of(rng, engine) for _ in range(count)]
    done = engine.generate(
        prompts, adapter=adapter, max_tokens=COMPLETION, ignore_eos=True, temperature=1.0, logprobs=0, seed=seed
    )
    assert isinstance(done, list)
    data, model = [], []
    for i, (prompt, completion) in enumerate(zip(prompts, done, strict=True)):
        assert completion.logprobs is not None
        weights = (1.0 if i % 2 else -1.0,) * len(completion.token_ids)
        logprobs = tuple(lp.sampled for lp in completion.logprobs)
        data.append(Datum((*prompt, *completion.token_ids), len(prompt), weights, logprobs))
        model.append([lp.model for lp in completion.logprobs])
    return data, model


def agreement(engine: Engine, trainer: Trainer, completions: int) -> dict[str, float]:
    """Return the differences between the trainer's logprobs and the sampler's."""
    label = trainer.publish()
    data, model = sampled(engine, label, completions, seed=7)
    result = trainer.forward(data, "importance_sampling")
    d = [p - q for ps, qs in zip(result.model_logprobs, model, strict=True) for p, q in zip(ps, qs, strict=True)]
    return {
        "tokens": len(d),
        "mean_difference": sum(map(abs, d)) / len(d),
        "largest_difference": max(map(abs, d)),
        "k3": sum(math.expm1(x) - x for x in d) / len(d),
    }


def timed(times: dict[str, list[float]], name: str, call: Any) -> Any:
    """Call `call`, add its seconds to `times[name]`, and return its result."""
    began = perf_counter()
    result = call()
    times.setdefault(name, []).append((perf_counter() - began) * 1e3)
    return result


def measure(engine: Engine, streams: int, seconds: float, repeats: int, completions: int) -> dict[str, Any]:
    """Run all rounds and return their figures."""
    trainer = engine.trainer("learner", rank=16)
    data, _ = sampled(engine, None, completions, seed=1)
    times: dict[str, list[float]] = {}
    serving_peak = engine.stats.peak_memory

    def update() -> None:
        timed(times, "pass_ms", lambda: trainer.forward_backward(data, "importance_sampling"))
        timed(times, "step_ms", lambda: trainer.step(RATE, grad_norm=1.0))
        timed(times, "publish_ms", trainer.publish)

    for _ in range(4):
        update()
    alone = {name: spread(values[1:], 1.0) for name, values in times.items()}
    agrees = agreement(engine, trainer, 2 * completions)
    print(f"agreement {agrees}\nalone {alone}", file=sys.stderr, flush=True)
    readers = Streams(engine, streams, "learner")
    readers.run(min(5.0, seconds), None)
    rounds = []
    for _ in range(repeats):
        times.clear()
        rounds.append({"idle": readers.run(seconds, None), "learning": readers.run(seconds, update)})
        rounds[-1]["beside"] = {name: spread(values, 1.0) for name, values in times.items()}
        print(rounds[-1], file=sys.stderr, flush=True)
    return {
        "info": {"device": engine.info.device, "dtype": engine.info.dtype, "parameters": engine.info.parameters},
        "trainer_parameters": trainer.info.parameters,
        "update_tokens": completions * (PROMPT + COMPLETION),
        "streams": streams,
        "agreement": agrees,
        "update_alone": alone,
        "rounds": rounds,
        "serving_peak_bytes": serving_peak,
        "peak_bytes": engine.stats.peak_memory,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="agreement of sampler and trainer, and what learning costs streams")
    parser.add_argument("--shape", help="a random model of this shape instead of the demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--completions", type=int, default=16, help="of an update; 16 are 2,048 tokens")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-device-") as scratch:
        options: dict[str, Any] = {"dtype": args.dtype, "max_model_len": 2048, "num_blocks": 2048}
        model: Path = demo.MODEL_PATH
        if args.shape:
            shape = SHAPES[args.shape]
            small = shape.parameters < 1e9
            model = write_model(Path(scratch) / args.shape, shape, weights=small)
            options["random_weights"] = not small
        with Engine(model, {}, **options) as engine:
            result = measure(engine, args.streams, args.seconds, args.repeats, args.completions)
    if args.json_out:
        whole = describe() | {"shape": args.shape or "demo"} | result
        write_json(args.json_out, whole)
    print(f"k3 of sampler and trainer: {result['agreement']['k3']:.1e} nats; the last round: {result['rounds'][-1]}")


if __name__ == "__main__":
    main()
