"""What the cache of states is worth to a hybrid, and what a row that joins or leaves costs the others.

    python benchmarks/hybrids.py --json-out benchmarks/results/hybrids.json

Random weights in the shape of a small Granite 4: layers of Mamba 2 and one with attention. Three parts:

- the first token of a prompt, computed, found in memory, and found on the drive by an engine that was started after;
- a conversation that grows by a message and an answer each turn, whose answers go back as text: how many of the
  prompts' tokens were found, and how many a turn repeats of the one before and its answer;
- the times between the tokens of streams beside one more stream, and beside short requests in its place, of which the
  next joins when one leaves. Their prompts are found but for one token, so that what is compared is the joining itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from partial import Results, stop_cleanly

from mlx_tandem.api.engine import Engine
from mlx_tandem.cli.bench.script import Answers, Script, Work, run_script
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.bench.stats import spread
from mlx_tandem.cli.outputs import argument
from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.types import EngineInfo, Request, SamplingParams

POSITIONS = 8192
PARTS = ("first_token", "conversation", "joins")
SYSTEM_TOKENS = 600
"""Tokens of the conversation's first message, about."""
JOINING = 16
"""Tokens that each short request gets before it leaves."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="what the cache of states is worth, and what joining rows cost")
    parser.add_argument("--shape", default="4m", choices=[name for name, s in SHAPES.items() if s.dtype == "float32"])
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=600, help="of each stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    parts = args.parts.split(",")
    results = Results(args.json_out, shape=f"granitemoehybrid-{args.shape}", repeats=args.repeats)
    with tempfile.TemporaryDirectory(prefix="tandem-hybrids-") as scratch:
        model = write_hybrid(Path(scratch) / "model", args.shape)
        if "first_token" in parts:
            results.add(first_token=first_tokens(model, args.prompt_tokens, args.repeats))
        if "conversation" in parts:
            with Engine(model, {}, max_loras=0, max_model_len=SYSTEM_TOKENS + 400 * args.turns) as engine:
                results.add(conversation=talk(engine, args.turns))
        if "joins" in parts:
            results.add(joins=joins(model, args.streams, args.max_tokens, args.repeats))
    results.finish()
    report(results.found)


def report(found: dict[str, Any]) -> None:
    """Print the three figures."""
    if row := found.get("first_token"):
        print(
            f"first token of {row['prompt_tokens']:,}: computed {row['computed_ms']:,.1f} ms; "
            f"from memory {row['memory_ms']:,.1f} ms, {row['memory_ratio']:.1f} times as fast; "
            f"from the drive {row['drive_ms']:,.1f} ms, {row['drive_ratio']:.1f} times as fast"
        )
    if row := found.get("conversation"):
        print(
            f"{len(row['turns'])} turns: {row['cached_share']:.1%} of the prompts' tokens were found from the second "
            f"turn on, of {row['possible_share']:.1%} that were repeated"
        )
    if row := found.get("joins"):
        print(
            f"p99 between tokens of {row['streams']} streams: {row['steady_p99_ms']:.2f} ms beside another stream, "
            f"{row['joins_p99_ms']:.2f} ms while {row['joined']} rows join and leave, ratio {row['p99_ratio']:.3f}"
        )


def write_hybrid(folder: Path, name: str) -> Path:
    """Write a model folder with random float32 weights and the dimensions of the shape of this name."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map_with_path
    from mlx_lm.models import granitemoehybrid

    family: Any = granitemoehybrid
    shape = SHAPES[name]
    write_model(folder, shape, positions=POSITIONS, weights=False)
    plain = json.loads((folder / "config.json").read_text())
    config = {
        **{key: plain[key] for key in ("hidden_size", "vocab_size", "max_position_embeddings", "eos_token_id")},
        "model_type": "granitemoehybrid",
        "intermediate_size": shape.intermediate,
        "shared_intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "layer_types": ["attention" if i == shape.layers // 2 else "mamba" for i in range(shape.layers)],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "attention_bias": False,
        "mamba_n_heads": shape.hidden // 32,  # twice the model's width
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    mx.random.seed(0)
    module = family.Model(family.ModelArgs.from_dict(config))

    def drawn(name: str, p: mx.array) -> mx.array:
        return p if p.ndim == 1 else mx.random.normal(p.shape) * 1.5 * p.shape[-1] ** -0.5

    weights = dict(tree_flatten(tree_map_with_path(drawn, module.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def first_tokens(model: Path, length: int, repeats: int) -> dict[str, Any]:
    """Return the times of each prompt's first token; the first prompt compiles and is not counted."""
    options: dict[str, Any] = {"max_loras": 0, "max_model_len": length + 16}
    options |= {"ssd_cache_dir": str(model.parent / "kv")}
    prompts = [_tokens(length, seed) for seed in range(repeats + 1)]
    rounds: list[dict[str, float]] = []
    with Engine(model, {}, **options) as engine:
        _opened(engine)
        for prompt in prompts:
            computed, memory = _timed(engine, prompt), _timed(engine, prompt)
            rounds.append({"computed_ms": computed[0], "memory_ms": memory[0], "memory_tokens": memory[1]})
    with Engine(model, {}, **options) as engine:
        _opened(engine)
        for row, prompt in zip(rounds, prompts, strict=True):
            row["drive_ms"], row["drive_tokens"] = _timed(engine, prompt)
    rounds = rounds[1:]
    medians = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    ratios = {f"{k}_ratio": round(medians["computed_ms"] / medians[f"{k}_ms"], 2) for k in ("memory", "drive")}
    return {"prompt_tokens": length, **medians, **ratios, "rounds": rounds}


def talk(engine: Engine, turns: int) -> dict[str, Any]:
    """Run a conversation: each turn has the messages and answers before it, and a new message."""
    messages = [{"role": "system", "content": _text(SYSTEM_TOKENS, 1)}]
    rows: list[dict[str, int]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": _text(100, 2 + turn)})
        done = engine.chat(messages, max_tokens=60, ignore_eos=True, seed=turn)
        counts = done.prompt_tokens, done.cached_tokens, len(done.token_ids)
        rows.append(dict(zip(("prompt_tokens", "cached_tokens", "answer_tokens"), counts, strict=True)))
        messages.append({"role": "assistant", "content": done.text})
    later = rows[1:]
    total = max(sum(r["prompt_tokens"] for r in later), 1)
    possible = sum(before["prompt_tokens"] + before["answer_tokens"] for before in rows[:-1])
    share = sum(r["cached_tokens"] for r in later) / total
    return {"cached_share": round(share, 4), "possible_share": round(possible / total, 4), "turns": rows}


def joins(model: Path, streams: int, max_tokens: int, repeats: int) -> dict[str, Any]:
    """Return the times between the tokens of `streams` streams beside one more, and beside rows that come and go."""
    config = EngineConfig(
        model=ModelConfig(path=str(model), max_model_len=max_tokens + 64),
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=streams + 1),
        lora=LoraConfig(max_loras=0),
    )
    joined = max(max_tokens // (JOINING + 2), 1)
    rounds: list[dict[str, float]] = []

    def script(info: EngineInfo) -> Script:
        number = 0

        def ask(prompt: list[int], tokens: int) -> m.Submit:
            nonlocal number
            number += 1
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            return m.Submit(Request(number, tuple(prompt), params))

        short = _tokens(info.block_size + 1, 0)
        yield Work([ask(short, 1)])  # its first block is found from now on
        for repeat in range(repeats + 1):
            row: dict[str, float] = {}
            for name in ("steady", "joins")[:: -1 if repeat % 2 else 1]:
                beside = [(short, max_tokens)] if name == "steady" else [(short, JOINING)] * joined
                long = [ask(_tokens(info.block_size, 1 + i), max_tokens) for i in range(streams)]
                answers = yield Work([*long, *(ask(*each) for each in beside)], most=streams + 1)
                assert answers is not None
                found = spread(gaps(answers, range(streams)))
                row |= {f"{name}_p50_ms": found["p50"], f"{name}_p99_ms": found["p99"]}
            if repeat:  # the first compiles
                rounds.append(row | {"p99_ratio": round(row["joins_p99_ms"] / row["steady_p99_ms"], 3)})

    run_script(script, config)
    medians = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    return {"streams": streams, "joined": joined, **medians, "rounds": rounds}


def gaps(answers: Answers, rows: Sequence[int]) -> list[float]:
    """Return the milliseconds between tokens of these rows, from where all of them have begun."""
    times: dict[int, list[float]] = defaultdict(list)
    for when, given in answers.timeline.steps:
        for row in given:
            times[row].append(when)
    begun = max(times[row][0] for row in rows)
    return [(b - a) * 1e3 for row in rows for a, b in pairwise(times[row]) if a >= begun]


def _opened(engine: Engine) -> None:
    while (disk := engine.stats.disk) is None or disk.scanning:
        sleep(0.05)


def _timed(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Return the milliseconds to the first token, and how many of the prompt's tokens were found."""
    started = perf_counter()
    done = engine.generate(prompt, max_tokens=1)
    return round((perf_counter() - started) * 1e3, 2), done.cached_tokens


def _tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(count)]


def _text(words: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice("bdfgklmn") + rng.choice("aeiou") for _ in range(words))


if __name__ == "__main__":
    main()
