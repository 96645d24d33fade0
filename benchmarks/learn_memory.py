"""What memory does learning need beside serving, and what would two processes need for the same work?

    python benchmarks/learn_memory.py --json-out benchmarks/results/learn_memory.json
    python benchmarks/learn_memory.py --shape qwen3-8b --dtype bfloat16

Each way is measured in a process of its own, by MLX's count of its peak: updates of about 2,048 tokens in a process
that serves nothing; streams of the base and of the adapter that was learned; the same streams beside the same updates,
each stepped and published; and mlx-lm's own LoRA trainer on a batch of that size, with and without checkpointing its
layers. One more process runs the slices of one of an update's micro-batches apart, to see what the activations of one
layer come to. What each way found is in the file when it ends; `--ways` leaves some out.

A step with the prompts of all streams needs more than any other, the more the further the host runs ahead of the device
in it; and how many prompts meet in one step is chance. So both ways with streams begin with what streams may come to:
all of them asking at once, again and again.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from learn_device import COMPLETION, PROMPT, RATE, Streams, prompt_of, sampled
from partial import Results, stop_cleanly

from mlx_tandem import demo
from mlx_tandem.api import Engine
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.outputs import argument
from mlx_tandem.engine.learning import Batch, Datum, LossConfig, TrainerSpec

RANK = 16
UPDATE = 16  # completions: 2,048 tokens
WAYS = ("learning", "serving", "both", "slices", "mlx-lm", "mlx-lm checkpointed")
UPDATES = 4
BURSTS = 24  # shapes that are new and moments in which the host is slow keep it from running ahead


def burst(engine: Engine, adapter: str, count: int, rng: random.Random) -> None:
    """Send `count` prompts that run in one step, every second one for the adapter."""
    prompts = [prompt_of(rng, engine) for _ in range(count)]
    engine.generate(prompts, adapter=[adapter if i % 2 else None for i in range(count)], max_tokens=4)


def engine_of(args: argparse.Namespace, blocks: int) -> Engine:
    """Return an engine for one way."""
    adapters = {"learned": Path(args.adapter)} if Path(args.adapter).exists() else {}
    return Engine(
        Path(args.model), adapters, dtype=args.dtype, max_model_len=2048, num_blocks=blocks, random_weights=args.random
    )


def with_engine(args: argparse.Namespace, *, serving: bool, learning: bool) -> dict[str, Any]:
    """Run serving, learning or both, and return the peak of memory."""
    with engine_of(args, args.blocks if serving else 64) as engine:
        loaded = engine.stats.active_memory
        update: Callable[[], None] | None = None
        found: dict[str, Any] = {}
        if learning:
            data, _ = sampled(engine, None, UPDATE, seed=1)
            trainer = engine.trainer("learner", rank=RANK)
            found["trainer_parameters"] = trainer.info.parameters

            def learn() -> None:
                trainer.forward_backward(data, "importance_sampling")
                trainer.step(RATE, grad_norm=1.0)
                if serving:
                    trainer.publish()

            update = learn
        if serving:
            sampled(engine, "learned", args.streams, seed=2)
            if update is not None:
                update()
            adapter = "learner" if update else "learned"
            rng = random.Random(3)
            for _ in range(BURSTS):
                burst(engine, adapter, args.streams, rng)
            Streams(engine, args.streams, adapter).run(args.seconds, update)
        elif update is not None:
            for _ in range(UPDATES):
                update()
            trainer.save(args.adapter)
        return found | {"loaded_bytes": loaded, "peak_bytes": engine.stats.peak_memory}


def slices(args: argparse.Namespace) -> dict[str, Any]:
    """Return for each slice of one of an update's micro-batches the memory that it needs, while it runs and after
    it.
    """
    import mlx.core as mx

    from mlx_tandem.config import ModelConfig
    from mlx_tandem.model import backend
    from mlx_tandem.model.loader import load
    from mlx_tandem.model.modules import clone
    from mlx_tandem.training.device.cutting import Cutter
    from mlx_tandem.training.device.trainers import MLXTrainers

    model = load(ModelConfig(args.model, args.dtype, random_weights=args.random), lambda stage, done: None)
    size = backend.current().learning.micro_batch_tokens
    trainers = MLXTrainers(clone(model.module), model.dtype, vocab_size=1000, micro_batch_tokens=size, most_tokens=2048)
    trainers.open(TrainerSpec("learner", RANK, 2.0 * RANK), "", None)
    datum = Datum(tuple(range(3, 3 + PROMPT + COMPLETION)), PROMPT, (1.0,) * COMPLETION)
    batch = Batch("learner", (datum,) * UPDATE, LossConfig("cross_entropy"))
    rows = max(len(items) for items in Cutter(size, True).cut([batch]))
    batch = Batch("learner", (datum,) * rows, batch.loss)
    most: list[int] = []
    run = trainers.run((batch,), False, 0)
    begun = mx.get_active_memory()
    while True:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        try:
            next(run)()
        except StopIteration:
            break
        most.append(int(mx.get_peak_memory() - max(before, mx.get_active_memory())))
    layers, hidden = len(trainers._tree.layers), model.module.args.hidden_size
    tokens = rows * (PROMPT + COMPLETION)
    most = most[2:-1]  # without those that begin a pass and a micro-batch, and the one that reads what was found
    return {
        "layer_bytes": max(most[:layers] + most[-layers:]),
        "head_bytes": max(most[layers:-layers]),
        "layer_inputs_bytes": layers * tokens * hidden * model.dtype.size,
        "held_bytes": mx.get_active_memory() - begun,
    }


def mlx_lm(args: argparse.Namespace, *, checkpointed: bool) -> dict[str, Any]:
    """Run mlx-lm's own LoRA layers, loss, checkpointing and Adam on one batch of the same size."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.optimizers import Adam
    from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
    from mlx_lm.tuner.utils import linear_to_lora_layers

    from mlx_tandem.config import ModelConfig
    from mlx_tandem.model.loader import load

    model: Any = load(ModelConfig(args.model, args.dtype, random_weights=args.random), lambda s, d: None).module
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": 2.0, "dropout": 0.0})
    if checkpointed:
        checkpoint: Any = grad_checkpoint
        checkpoint(model.layers[0])
    model.train()
    tokens = mx.ones((UPDATE, PROMPT + COMPLETION), mx.int32)
    lengths = mx.array([[PROMPT, PROMPT + COMPLETION]] * UPDATE)
    optimizer = Adam(RATE)
    step = nn.value_and_grad(model, default_loss)
    for _ in range(UPDATES):
        _, gradients = step(model, tokens, lengths)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state)
    return {"peak_bytes": int(mx.get_peak_memory())}


def one(args: argparse.Namespace) -> dict[str, Any]:
    """Run one way in this process."""
    match args.way:
        case "slices":
            return slices(args)
        case "mlx-lm" | "mlx-lm checkpointed":
            return mlx_lm(args, checkpointed=args.way != "mlx-lm")
        case _:
            return with_engine(args, serving=args.way in ("serving", "both"), learning=args.way != "serving")


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what follows from the ways that were measured."""
    if not {"serving", "both", "slices"} <= found.keys():
        return {}
    serving, both = found["serving"]["peak_bytes"], found["both"]["peak_bytes"]
    parts = found["slices"]
    state = 16 * found["both"]["trainer_parameters"]
    allowed = serving + parts["layer_inputs_bytes"] + parts["layer_bytes"] + state
    return {
        "allowed_bytes": allowed,
        "of_allowed": round(both / allowed, 4),
        "saved": {
            way: round(1 - both / (serving + found[way]["peak_bytes"]), 4)
            for way in ("learning", "mlx-lm", "mlx-lm checkpointed")
            if way in found
        },
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="memory of learning beside serving")
    parser.add_argument("--shape", help="a random model of this shape instead of the demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=256, help="of the KV pool")
    parser.add_argument("--seconds", type=float, default=15.0, help="of streams")
    parser.add_argument("--ways", default=",".join(WAYS), help="learning comes before serving: it makes the adapter")
    parser.add_argument("--way", choices=WAYS, help="measure this one here; for the processes that are started")
    parser.add_argument("--model", help="of --way")
    parser.add_argument("--adapter", help="of --way: where the learned adapter is, or will be")
    parser.add_argument("--random", action="store_true", help="of --way")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(one(args)))
        return
    stop_cleanly()
    results = Results(args.json_out, shape=args.shape or "demo")
    with tempfile.TemporaryDirectory(prefix="tandem-memory-") as scratch:
        model, random = demo.MODEL_PATH, False
        if args.shape:
            random = SHAPES[args.shape].parameters >= 1e9
            model = write_model(Path(scratch) / args.shape, SHAPES[args.shape], weights=not random)
        shared = [f"--model={model}", f"--dtype={args.dtype}", f"--streams={args.streams}", f"--blocks={args.blocks}"]
        shared += [f"--adapter={scratch}/learned", f"--seconds={args.seconds}"] + ["--random"] * random
        found: dict[str, dict[str, Any]] = {}
        for way in args.ways.split(","):
            began = perf_counter()
            run = [sys.executable, __file__, f"--way={way}", *shared]
            done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True)
            found[way] = json.loads(done.stdout.splitlines()[-1])
            print(f"{way}  {perf_counter() - began:.1f} s  {found[way]}", file=sys.stderr, flush=True)
            results.add(ways=found, **summary(found))
    results.finish()
    if result := summary(found):
        print(f"of what is allowed {result['of_allowed']}; saved against two processes: {result['saved']}")


if __name__ == "__main__":
    main()
