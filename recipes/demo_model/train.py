"""Makes the demo model: tokenizer, base, draft model, adapters.

    python -m recipes.demo_model.train --out DIR                   the real one (one NVIDIA GPU, minutes)
    python -m recipes.demo_model.train --out DIR --size tiny ...   a reduced run for a CPU (seconds)

The same seed and flags give the same tokenizer and the same data in the same order.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from . import data
from .text import BatchSpec, save_tokenizer, start_worker, train_tokenizer, work

Batch = tuple[np.ndarray, np.ndarray]


def fast_blas() -> None:
    """Load OpenBLAS before MLX on Linux, where MLX's CPU back end otherwise uses slow reference routines."""
    if sys.platform == "linux":
        with suppress(OSError):
            ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.demo_model.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write base/, draft/ and adapters/ to")
    parser.add_argument("--from", dest="start", type=Path, help="train on from this base/ and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=("base", "tiny"), default="base")
    parser.add_argument("--steps", type=int, default=3600, help="base model")
    parser.add_argument("--draft-steps", type=int, default=1000)
    parser.add_argument("--adapter-steps", type=int, help="instead of each adapter's own number")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens in a step")
    parser.add_argument("--length", type=int, default=512, help="tokens in an ordinary row")
    parser.add_argument("--long-length", type=int, default=4096, help="tokens in a row of a long step")
    parser.add_argument("--long-every", type=int, default=6, help="one step in so many uses long rows; 0: none")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate of base and draft")
    parser.add_argument("--adapter-rate", type=float, default=3e-3)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--tokenizer-chats", type=int, default=10000)
    parser.add_argument("--workers", type=int, default=12, help="data processes; 0: make batches in this one")
    parser.add_argument(
        "--skip", nargs="*", choices=("base", "draft", "adapters"), default=[], help="keep what --out has"
    )
    parser.add_argument("--adapters", nargs="*", help="train these adapters only")
    parser.add_argument("--report", default="training.json", help="name of the report file in --out")
    return parser


def batch_specs(
    args: argparse.Namespace, stage: int, steps: int, style: str, mix: dict[str, float], share: int = 1
) -> Iterator[BatchSpec]:
    """Yield the batches of one stage, in order."""
    for step in range(steps):
        long = args.long_every and step % args.long_every == args.long_every - 1
        length = args.long_length if long else args.length
        rows = max(1, args.batch_tokens // share // length)
        yield BatchSpec((args.seed * 100 + stage) * 1_000_000 + step, rows, length, style, tuple(mix.items()))


class Feed:
    """Makes batches in worker processes, or in this one if ``workers`` is 0; their order never depends on timing."""

    def __init__(self, tokenizer_file: Path, workers: int) -> None:
        self.pool = None
        if workers:
            context = multiprocessing.get_context("spawn")
            self.pool = context.Pool(workers, start_worker, (str(tokenizer_file),))
        else:
            start_worker(str(tokenizer_file))

    def __call__(self, specs: Iterator[BatchSpec]) -> Iterator[Batch]:
        """Yield the batches of these specs."""
        return self.pool.imap(work, specs, chunksize=2) if self.pool else map(work, specs)

    def close(self) -> None:
        """End the worker processes."""
        if self.pool:
            self.pool.terminate()
            self.pool.join()


@contextmanager
def feeding(tokenizer_file: Path, workers: int) -> Iterator[Feed]:
    """Yield a feed that is closed at the end of the block."""
    feed = Feed(tokenizer_file, workers)
    try:
        yield feed
    finally:
        feed.close()


def main(argv: list[str] | None = None) -> int:
    """Train the model."""
    args = arguments().parse_args(argv)
    fast_blas()
    start = time.perf_counter()
    out: Path = args.out
    if "base" not in args.skip:
        if args.start:
            tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
        else:
            tokenizer = train_tokenizer(args.seed, args.tokenizer_chats)
        save_tokenizer(tokenizer, out / "base")
        save_tokenizer(tokenizer, out / "draft")
    with feeding(out / "base" / "tokenizer.json", args.workers) as feed:
        report = train(args, feed)
    report["seconds"] = round(time.perf_counter() - start, 1)
    (out / args.report).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def train(args: argparse.Namespace, feed: Feed) -> dict[str, object]:
    """Run all stages; return what the report says about them."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from . import learn, model

    out: Path = args.out
    compute = getattr(mx, args.precision)
    size = model.SIZES[args.size]
    small = model.SIZES["draft" if args.size == "base" else "tiny"]
    vocabulary = 1024
    stages: dict[str, object] = {}
    if "base" not in args.skip:
        mx.random.seed(args.seed)
        base = model.load_model(args.start) if args.start else model.build(size, vocabulary)
        done = learn.fit(
            base,
            learn.next_token_loss,
            feed(batch_specs(args, 0, args.steps, "base", data.MIX)),
            steps=args.steps,
            rate=args.rate,
            decay=0.05,
            compute=compute,
            label="base",
        )
        model.save_model(base, size, vocabulary, out / "base")
        stages["base"] = asdict(done)
    for number, adapter in enumerate(model.ADAPTERS):
        if "adapters" in args.skip or (args.adapters and adapter.name not in args.adapters):
            continue
        steps = args.adapter_steps or adapter.steps
        mx.random.seed(args.seed + 10 + number)
        base = model.load_model(out / "base", compute)
        model.add_lora(base, adapter.rank, adapter.scale)
        done = learn.fit(
            base,
            learn.next_token_loss,
            feed(batch_specs(args, 10 + number, steps, adapter.name, data.MIX | dict(adapter.mix), 2)),
            steps=steps,
            rate=args.adapter_rate,
            decay=0.0,
            compute=compute,
            label=adapter.name,
        )
        arrays = dict(tree_flatten(base.trainable_parameters()))
        model.save_adapter(arrays, adapter, size.layers, out / "adapters" / adapter.name)
        stages[adapter.name] = asdict(done)
    if "draft" not in args.skip:
        mx.random.seed(args.seed + 1)
        draft = model.build(small, vocabulary)
        done = learn.fit(
            draft,
            learn.distillation_loss(model.load_model(out / "base", compute)),
            feed(batch_specs(args, 1, args.draft_steps, "base", data.MIX)),
            steps=args.draft_steps,
            rate=args.rate,
            decay=0.05,
            compute=compute,
            label="draft",
        )
        model.save_model(draft, small, vocabulary, out / "draft")
        stages["draft"] = asdict(done)
    flags = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    del flags["out"]
    return {
        "flags": flags,
        "tokens_per_step": args.batch_tokens,
        "device": str(mx.default_device()),
        "python": platform.python_version(),
        "stages": stages,
    }


if __name__ == "__main__":
    raise SystemExit(main())
