"""Measure what a KV cache of few bits holds, how it changes answers, and what it costs, on the built-in model.

    python benchmarks/kv_quant.py [--questions 6] [--rounds 9] [--steps 12] [--out FILE]

- size: bytes per token and layer by the width of a head, compared with bfloat16;
- admitted: sequences that the scheduler lets run at once in the same memory;
- perplexity: of held-out chats, whole and of their answers alone, by bits, group and type of the scales;
- decode: milliseconds of a step, pools interleaved in one process, the median of the rounds.
"""

# ruff: noqa: I001
from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_tandem.model import backend  # first: it loads a fast BLAS before MLX

import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from mlx_tandem import demo
from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.plan import CARRY, Row, RowKind, Seating, StepPlan
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.kv.groups.attention import AttentionGroup
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.model.build import Built, build
from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.types import Request, SamplingParams
from recipes.demo_model import data, evaluate, text

BLOCK = 16
WIDTHS = (64, 80, 96, 112, 128, 192, 256, 576)
Round = Callable[[mx.array], mx.array]  # maps [n, dim] to the same numbers as a pool returns them


def served(kv_bits: int, num_blocks: int, max_num_seqs: int) -> Built:
    """Return an engine's runner with a cache of this many bits."""
    config = EngineConfig(
        model=ModelConfig(path=str(demo.MODEL_PATH)),
        cache=CacheConfig(block_size=BLOCK, num_blocks=num_blocks, kv_bits=kv_bits),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        lora=LoraConfig(max_loras=0),
    )
    return build(config, {}, lambda stage, fraction: None)


# --- size -----------------------------------------------------------------------------------------------------------


def sizes() -> list[dict[str, object]]:
    """Return the bytes per token and layer by the width of a head."""
    rows: list[dict[str, object]] = []
    for dim in WIDTHS:
        full = RowFormat(1, dim, mx.bfloat16).bytes_per_token()
        for bits in (8, 4):
            for group in (32, 64, 128):
                form = RowFormat(1, dim, mx.bfloat16, bits, group)
                own = form.bytes_per_token()
                row = {"dim": dim, "bits": bits, "asked": group, "group": dim // form.groups, "bytes": own}
                rows.append(row | {"of_bfloat16": round(own / full, 4)})
    return rows


def admitted(budget: int, bytes_per_token: int, prompt: int) -> int:
    """Return how many sequences of `prompt` tokens the scheduler lets run at once over a pool of `budget` bytes."""
    pool = BlockPool(budget // (bytes_per_token * BLOCK), BLOCK)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4096),
        BlockManager([AttentionGroup(pool)]),
        SlotTable(0),
        max_model_len=8192,
        vocab_size=1024,
        eos_token_ids=(),
    )
    for i in range(4096):
        scheduler.add(Request(i, (1 + i % 1000, 1 + i // 1000) + (5,) * (prompt - 2), SamplingParams(max_tokens=16)))
    scheduler.plan()
    return scheduler.queue.num_running


# --- perplexity -----------------------------------------------------------------------------------------------------


class RoundedCache(KVCache):
    """A cache whose keys and values are rounded by a function."""

    def __init__(self, rounded: Round):
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounded = rounded

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Return all keys and values, rounded."""
        rounded = (self._rounded(x.reshape(-1, x.shape[3])).reshape(x.shape) for x in (keys, values))
        return super().update_and_fetch(*rounded)  # type: ignore[no-untyped-call]


def pool_of(bits: int, group: int) -> Round:
    """Return the rounding of the pool."""

    def rounded(x: mx.array) -> mx.array:
        form = RowFormat(1, x.shape[1], x.dtype, bits, group)
        return form.decode(form.encode(x))

    return rounded


def quantize(bits: int, group: int, scales: mx.Dtype) -> Round:
    """Return the rounding of `mx.quantize`, whose grid is rounded to the type of the scales after the codes were
    chosen.
    """

    def rounded(x: mx.array) -> mx.array:
        codes, *grid = mx.quantize(x, group_size=group, bits=bits)
        scale, bias = (a.astype(scales).astype(mx.float32) for a in grid)
        return mx.dequantize(codes, scale, bias, group_size=group, bits=bits)

    return rounded


VARIANTS: dict[str, Round] = {
    "float32": lambda x: x,
    "bfloat16": lambda x: x.astype(mx.bfloat16).astype(x.dtype),
    "8 bits, group 32": pool_of(8, 32),
    "8 bits, group 64 (taken)": pool_of(8, 64),
    "4 bits, group 32": pool_of(4, 32),
    "4 bits, group 64": pool_of(4, 64),
} | {
    f"mx.quantize, {bits} bits, group 64, {name}": quantize(bits, 64, scales)
    for bits in (8, 4)
    for name, scales in (("float32", mx.float32), ("float16", mx.float16), ("bfloat16", mx.bfloat16))
}


def perplexities(questions: int, long_questions: int) -> dict[str, dict[str, float]]:
    """Return the perplexity of held-out chats' tokens, and of their answers alone; a few of the chats are long.

    k3 is the distance of the logprobs from those with a full cache, as learning measures it between sampler and
    trainer.
    """
    model: Any = load_model(demo.MODEL_PATH)[0]
    model.set_dtype(mx.float32)
    tokenizer = Tokenizer.from_file(str(demo.MODEL_PATH / "tokenizer.json"))
    chats = [chat for skill in data.MIX for chat in evaluate.questions(11, skill, questions)]
    chats += [chat for chat, _ in evaluate.long_questions(tokenizer, 12, "repeat", long_questions)]
    texts = []
    for chat in chats:
        asked = text.encode(tokenizer, text.prompt_text(chat))
        texts.append((asked, text.encode(tokenizer, text.full_text(chat))))
    found: dict[str, dict[str, float]] = {}
    plain: tuple[list[float], list[float]] | None = None
    for name, rounded in VARIANTS.items():
        whole: list[float] = []
        answers: list[float] = []
        for asked, ids in texts:
            cache = [RoundedCache(rounded) for _ in model.layers]
            logits = model(mx.array([ids]), cache=cache)[0, :-1]
            picked = mx.take_along_axis(logits, mx.array(ids[1:])[:, None], -1)[:, 0]
            loss: Any = (mx.logsumexp(logits, -1) - picked).tolist()
            whole += loss
            answers += loss[len(asked) - 1 :]
        plain = plain or (whole, answers)
        own: dict[str, float] = {"tokens": len(whole), "answer_tokens": len(answers)}
        for part, losses, exact in zip(("whole", "answers"), (whole, answers), plain, strict=True):
            perplexity, before = (math.exp(statistics.fmean(x)) for x in (losses, exact))
            apart = [a - b for a, b in zip(losses, exact, strict=True)]
            own[part] = round(perplexity, 6)
            own[f"{part}_change_percent"] = round((perplexity / before - 1) * 100, 4)
            own[f"{part}_k3"] = float(f"{statistics.fmean(math.expm1(d) - d for d in apart):.3g}")
        print(f"  {name}: {own}", flush=True)
        found[name] = own
    return found


# --- speed ----------------------------------------------------------------------------------------------------------


def decode_times(pools: dict[str, Built], rows: int, context: int, rounds: int, steps: int) -> dict[str, float]:
    """Return the milliseconds of a step in which `rows` sequences of `context` tokens get their next one."""
    times: dict[str, list[float]] = {name: [] for name in pools}
    width = -(-(context + (rounds + 2) * steps) // BLOCK)
    tables = [tuple(range(1 + seat * width, 1 + (seat + 1) * width)) for seat in range(rows)]
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    seatings = tuple(Seating(seat, greedy, 0, 1, (0,)) for seat in range(rows))
    for turn in range(rounds + 1):
        for name, built in pools.items():
            runner, flights = built.runner, []
            started = time.perf_counter()
            for step in range(steps):
                at = context + turn * steps + step
                plan = StepPlan(
                    tuple(
                        Row(RowKind.DECODE, seat, seat, 0, at, (CARRY,), (tables[seat],), True) for seat in range(rows)
                    ),
                    seatings=() if turn or step else seatings,
                )
                flights.append(runner.launch(plan))
                if len(flights) > 1:
                    runner.wait(flights.pop(0))
            runner.wait(flights.pop())
            if turn:
                times[name].append((time.perf_counter() - started) / steps * 1e3)
    return {name: round(statistics.median(t), 4) for name, t in times.items()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=6, help="of each skill")
    parser.add_argument("--long-questions", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    blocks = 2 + max(options.rows) * (2 + (max(options.context) + (options.rounds + 2) * options.steps) // BLOCK)
    pools = {f"{bits} bits": served(bits, blocks, max(options.rows)) for bits in (16, 8, 4)}
    per_token = {name: built.info.kv_bytes_per_token for name, built in pools.items()}
    per_token["bfloat16"] = per_token.pop("16 bits") // 2  # on a CPU the model is float32
    for built in pools.values():
        info = built.info
        assert built.runner.pool_bytes == info.kv_bytes_per_token * info.block_size * info.num_blocks
    memory = {
        "bytes_per_token": per_token,
        "admitted": {
            f"{prompt} tokens in 256 MiB": {name: admitted(256 << 20, own, prompt) for name, own in per_token.items()}
            for prompt in (256, 1024)
        },
    }
    print(json.dumps(memory, indent=1))
    perplexity = perplexities(options.questions, options.long_questions)
    decode = []
    for rows in options.rows:
        for context in options.context:
            times = decode_times(pools, rows, context, options.rounds, options.steps)
            ratio = {name: round(times["16 bits"] / ms, 3) for name, ms in times.items()}
            decode.append({"rows": rows, "context": context, "milliseconds": times, "speed_of_16_bits": ratio})
            print(f"  {rows} rows, {context} tokens: {times} {ratio}")
    if options.out:
        report = describe() | {"device": backend.current().describe(), "memory": memory, "sizes": sizes()}
        report |= {"perplexity": perplexity, "decode": decode}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
