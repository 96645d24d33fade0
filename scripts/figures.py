"""Write the figures in README.md, docs/learning.md and docs/performance.md from the files in benchmarks/results.

python scripts/figures.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mlx_tandem.cli.bench import sides as bench
from mlx_tandem.model.ops.products.skinny import eighths, forms

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
ALL, LEARNING, PERFORMANCE = (ROOT / "docs" / f"{name}.md" for name in ("figures", "learning", "performance"))
RESULTS = ROOT / "benchmarks" / "results"
MIXES = ("skew/same", "long-decode-mixed/long-decode-same")
PICTURE, PICTURE_OF = ROOT / "docs" / "adapters.svg", "adapters-0.13m.json"
PUBLISHES = "publishes.json"
HIGHLIGHTS = ("peers.json", PICTURE_OF, "prefix.json", "learn.json", "engine-8b-base.json")
CURVE, CURVE_OF = ROOT / "docs" / "learn.svg", "learn.json"
BEGIN, END = "<!-- figures: make figures -->\n", "<!-- end of figures -->\n"


def highlights() -> str:
    """Return five lines with the figures that people ask for first, each with a link to its data."""
    peer, mixed, known, taught, of_8b = map(_read, HIGHLIGHTS)
    rows = peer["shapes"]["4m"]["ratios"]
    spread = {name: [row[f"tandem/{name}"] for row in rows] for name in ("mlx_lm.server", "vllm-mlx")}
    faster = ", ".join(f"{min(of):.1f} to {max(of):.1f} times {name}'s speed" for name, of in spread.items())
    levels = [row["concurrency"] for row in rows]
    crowd = mixed["ratios"][-1]
    step = of_8b["results"][-1]
    first = known["first_token"][-1]
    run = next(run for run in taught["results"] if run["run"] == "true")
    said = (
        f"4M model, {min(levels)} to {max(levels)} streams: {faster}",
        f"{mixed['shape'].upper()} model, {crowd['concurrency']} streams over {len(mixed['load']['adapters'])} "
        f"adapters: {crowd['mixed/base']:.0%} of the base's speed",
        f"first token after {first['prompt_tokens']:,} cached tokens: {first['hit_ms']:.0f} ms "
        f"instead of {first['cold_ms']:.0f}",
        f"`tandem demo learn`'s skill: mean reward {_rise(run)} in {run['seconds']:.0f} s",
        f"8B model on an {of_8b['engine']['device']}, {step['batch']} streams: "
        f"{step['tandem']['decode_tokens_per_s']:,.0f} tokens/s",
    )
    lines = "".join(f"- {text} ([data]({_link(name)}))\n" for text, name in zip(said, HIGHLIGHTS, strict=True))
    (cores,) = {each["machine"]["cores"] for each in (peer, mixed, known, taught)}
    return f"On {cores} CPU cores unless another device is named:\n\n{lines}"


def figures() -> str:
    """Return all tables; what was not measured yet has none."""
    parts = [
        *(peers(name, _read(name)) for name in _names("peers*.json")),
        *(engine(name, _read(name)) for name in _names("engine-*.json")),
        *(adapters(name, _read(name)) for name in _names("adapters-*.json")),
        *(http_share(name, _read(name)) for name in _names("http_share*.json")),
        *(long_prompt(name, _read(name)) for name in _names("long_prompt*.json")),
        *(first_byte(name, _read(name)) for name in _names("first_byte*.json")),
        *(registry(name, _read(name)) for name in _names("registry*.json")),
        *(hot_swap(name, _read(name)) for name in _names("hot_swap*.json")),
        *(overload(name, _read(name)) for name in _names("overload*.json")),
        *(tokenize_load(name, _read(name)) for name in _names("tokenize_load*.json")),
        *(prefix(name, _read(name)) for name in _names("prefix*.json")),
        *(learn(name, _read(name)) for name in _names("learn.json")),
        *(learn_here(name, _read(name)) for name in _names("learn-on-*.json")),
        *(guard(name, _read(name)) for name in _names("learn-guard.json")),
        *(rate(name, _read(name)) for name in _names("rate.json")),
        *(groups(name, _read(name)) for name in _names("groups*.json")),
        *(learn_beside(name, _read(name)) for name in _names("learn_beside*.json")),
        *(learn_device(name, _read(name)) for name in _names("learn_device*.json")),
        *(learn_memory(name, _read(name)) for name in _names("learn_memory*.json")),
    ]
    return "\n".join(parts) if parts else "No figures are committed yet.\n"


def peers(name: str, result: dict[str, Any]) -> str:
    """Return the table of servers compared with each other."""
    text = f"**Servers beside each other**, streamed events per second, {_where(result)} ([data]({_link(name)})).\n\n"
    for shape, content in result["shapes"].items():
        servers = list(content["rounds"])
        text += _head(f"{shape} model, at once", *servers, *(f"tandem / {s}" for s in servers[1:]))
        for row in content["ratios"]:
            level = row["concurrency"]
            at = {r["server"]: r["median"] for r in content["results"] if r["concurrency"] == level}
            cells = [f"{at[s]['events_per_s']:,.0f}" for s in servers]
            text += _row(str(level), *cells, *(f"{row[f'tandem/{s}']:.2f}" for s in servers[1:]))
        text += "\n"
    return text


def engine(name: str, result: dict[str, Any]) -> str:
    """Return the table of the engine without HTTP."""
    rows, load = result["results"], result.get("load", {})
    sides = [side for side in bench.NAMES if any(side in row for row in rows)]
    how = "greedy" if load.get("sampling") == "greedy" else "a different sampler per row"
    where = _where(result) if "core" in result["engine"]["device"] else _device(result)
    beside = " beside mlx-lm's BatchGenerator" if bench.PEER in sides else ""
    text = (
        f"**The engine without HTTP, {result['model']} model**, decoded tokens per second{beside}, {how}, {where} "
        f"([data]({_link(name)})).\n\n"
    )
    ratios = [
        key for key in ("decode", "same/base", "mixed/base", "mixed/same") if any(key in r["ratio"] for r in rows)
    ]
    heads = {"decode": "ratio", "same/base": "one / base", "mixed/base": "mixed / base", "mixed/same": "mixed / one"}
    timed = ("a step", "its floor") if "step_ms" in rows[0]["tandem"] else ()
    text += _head("batch", *(bench.NAMES[side] for side in sides), *(heads[key] for key in ratios), *timed)
    for row in rows:
        cells = [f"{row[side]['decode_tokens_per_s']:,.0f}" if side in row else "" for side in sides]
        cells += [f"{row['ratio'][key]:.2f}" if key in row["ratio"] else "" for key in ratios]
        cells += [f"{row['tandem'][key]:.2f} ms" for key in ("step_ms", "floor_ms") if timed]
        text += _row(bench.label(row) if "prompt_tokens" in row else str(row["batch"]), *cells)
    return text


def http_share(name: str, result: dict[str, Any]) -> str:
    """Return the table of one load through HTTP and without."""
    options, load = result["options"], result["engine"]["results"][0]["tandem"]
    text = (
        f"**Through HTTP and without, {options['shape']} model**, {options['streams']} streams that each ask again "
        f"when they have their answer, {options['prompt_tokens']} tokens in and {options['max_tokens']} out, "
        f"{_where(result)} ([data]({_link(name)})).\n\n"
    )
    text += _head("", "tokens per second", "from token to token, p50")
    http = result["http"]["median"]
    text += _row("through HTTP", f"{http['tokens_per_s']:,.0f}", f"{http['inter_token_ms']['p50']:.1f} ms")
    alone = f"{load['loop_tokens_per_s']:,.0f}", f"{load['loop_inter_token_p50_ms']:.1f} ms"
    text += _row("the engine, the same loop", *alone)
    only = f"{load['decode_tokens_per_s']:,.0f}", f"{load['step_ms']:.1f} ms"
    return text + _row("the engine, no prompts meanwhile", *only)


def performance() -> str:
    """Return the tables of where steps spend their time, and how near they are to what the device could do."""
    parts = [
        *(decode_steps(name, _read(name)) for name in _names("decode_steps*.json")),
        *(step_parts(name, _read(name)) for name in _names("step_parts*.json")),
        *(skinny(name, _read(name)) for name in _names("skinny*.json")),
        *(floors(name, _read(name)) for name in _names("engine-*.json") if "copy_bytes_per_s" in _read(name)),
    ]
    return "\n".join(parts) if parts else "No figures are committed yet.\n"


def decode_steps(name: str, result: dict[str, Any]) -> str:
    """Return the table of steps, with the newest run of each kind of step."""
    text = (
        f"**Steps and prompts by themselves, {result['shape']} model**, {result['dtype']}, random weights, "
        f"{result['device']} ([data]({_link(name)})); of each the newest run that has it.\n\n"
    ) + _head("rows × tokens", "a step, p50", "tokens per second")
    newest: dict[tuple[str, int, int], dict[str, Any]] = {}
    for run in result["runs"]:
        newest |= {(kind, r["rows"], r["length"]): r for kind in ("decode", "prompts") for r in run[kind]}
    for (kind, rows, length), r in sorted(newest.items()):
        ms = r["p50_ms"] if kind == "decode" else r["ms"]
        rate = rows * (1 if kind == "decode" else length) / ms * 1e3
        label = f"{rows} × {length:,}" + (", prompts alone" if kind == "prompts" else "")
        text += _row(label, f"{ms:,.2f} ms", f"{rate:,.0f}")
    return text


def skinny(name: str, result: dict[str, Any]) -> str:
    """Return the table of products of few rows, with the fastest form of the kernel that servers try for each."""
    text = (
        f"**Products of few rows, linears of Qwen3-8B**, bfloat16, µs on the device, {_where(result)} "
        f"([data]({_link(name)})): cuBLAS, which MLX uses, and the kernel in the fastest of its forms.\n\n"
    )
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for row in result["results"]:
        tried = {",".join(map(str, form)) for form in forms(eighths(row["rows"]))}
        own = [way["device_us"] for way in row["kernel"] if way["form"] in tried]
        if own:
            found.setdefault(row["shape"], {})[row["rows"]] = row["plain"]["device_us"], min(own)
    counts = [n for n in (8, 16, 32) if all(n in by_rows for by_rows in found.values())]
    text += _head("rows", *(f"{n}, {whose}" for n in counts for whose in ("cuBLAS", "kernel")))
    for shape, by_rows in found.items():
        text += _row(shape, *(f"{us:.1f}" for n in counts for us in by_rows[n]))
    return text


def step_parts(name: str, result: dict[str, Any]) -> str:
    """Return the table of the parts of a step."""
    text = (
        f"**The parts of a step, {result['shape']} model** at a context of {result['context']:,}, in ms, "
        f"{_device(result)} ([data]({_link(name)})).\n\n"
    )
    parts = ("step", "linears", "context", "sampling", "rest", "floor", "host")
    text += _head("batch", *(part.replace("host", "launching") for part in parts))
    for row in result["results"]:
        text += _row(str(row["batch"]), *(f"{row[f'{part}_ms']:.2f}" for part in parts))
    return text


def floors(name: str, result: dict[str, Any]) -> str:
    """Return the table of steps and the bytes that they move."""
    text = (
        f"**Steps and their floors, {result['model']} model**, answers of {result['load']['max_tokens']} tokens, "
        f"{_device(result)}, which copies {result['copy_bytes_per_s'] / 1e9:,.0f} GB/s ([data]({_link(name)})).\n\n"
    )
    text += _head(
        "batch", "", "weights", "keys and values", "adapters", "floor", "a step", "of the bandwidth", "prompts"
    )
    for row in result["results"]:
        for side in (side for side in bench.NAMES if side in row):
            m = row[side]
            sizes = (f"{m[f'{part}_bytes'] / 1e6:,.1f} MB" for part in ("weight", "cache", "adapter"))
            times = (f"{m['floor_ms']:.2f} ms", f"{m['step_ms']:.2f} ms", f"{m['bandwidth_share']:.0%}")
            text += _row(bench.label(row), bench.NAMES[side], *sizes, *times, f"{m['prefill_ms']:,.1f} ms")
    return text


def adapters(name: str, result: dict[str, Any]) -> str:
    """Return the table of what adapters cost."""
    text = (
        f"**What adapters cost, {result['shape']} model**, {len(result['load']['adapters'])} adapters of rank "
        f"{result['rank']} on all linears, tokens per second over HTTP, {_where(result)} ([data]({_link(name)})).\n\n"
    ) + _head("at once", "base", "one adapter", "mixed", "mixed / one", "one / base", "mixed / base")
    for row in result["ratios"]:
        level = row["concurrency"]
        at = {r["mode"]: r["median"]["tokens_per_s"] for r in result["results"] if r["concurrency"] == level}
        ratios = (f"{row[key]:.2f}" for key in ("mixed/same", "same/base", "mixed/base"))
        text += _row(str(level), *(f"{at[mode]:,.0f}" for mode in ("base", "same", "mixed")), *ratios)
    if name == PICTURE_OF:
        text += f"\n![The same as bars, with request times]({PICTURE.relative_to(ROOT).as_posix()})\n"
    mixes = [(row["concurrency"], [row[key] for key in MIXES if key in row]) for row in result["ratios"]]
    if all(len(ratios) == len(MIXES) for _, ratios in mixes):
        text += (
            "\nMixes beside one adapter with requests of the same lengths: `skew` sends four of five requests to one\n"
            "adapter, `long-decode-mixed` asks for answers four times as long.\n\n"
        ) + _head("at once", "skew / one", "long-decode-mixed / one")
        for level, ratios in mixes:
            text += _row(str(level), *(f"{ratio:.2f}" for ratio in ratios))
    return text


def long_prompt(name: str, result: dict[str, Any]) -> str:
    """Return the table of a long prompt beside running streams."""
    text = (
        f"**A long prompt beside {result['streams']} running streams, {result['shape']} model**, 99th percentile of "
        f"their inter-token time, {_where(result)} ([data]({_link(name)})).\n\n"
    ) + _head("prompt", "undisturbed", "meanwhile", "ratio", "first token of the prompt")
    for row in result["results"]:
        text += _row(
            f"{row['prompt_tokens']:,} tokens",
            f"{row['undisturbed_p99_ms']:.1f} ms",
            f"{row['meanwhile_p99_ms']:.1f} ms",
            f"{row['p99_ratio']:.2f}",
            f"{row['ttft_ms'] / 1e3:.2f} s",
        )
    return text


def first_byte(name: str, result: dict[str, Any]) -> str:
    """Return the table of the first bytes of streams whose prompts are long."""
    text = (
        f"**The first byte of a stream with a prompt of {result['tokens']:,} tokens, {result['shape']} model**, "
        f"medians of {len(result['routes'][0]['rounds'])}, {_where(result)} ([data]({_link(name)})).\n\n"
    ) + _head("route", "first byte", "the latest", "answer of one token")
    for row in result["routes"]:
        latest = max(each["first_byte_ms"] for each in row["rounds"])
        ms = f"{row['first_byte_ms']:.0f} ms", f"{latest:.0f} ms"
        text += _row(f"`{row['route']}`", *ms, f"{row['answer_ms'] / 1e3:.1f} s")
    read, found = (", ".join(f"{left[what]:.0%}" for left in result["left"]) for what in ("read", "found"))
    return text + f"\nWhen clients left, {read} of their prompts had been read. They asked again and found {found}.\n"


def registry(name: str, result: dict[str, Any]) -> str:
    """Return the table of many adapters on few slots."""
    few, all_of_them = result["servers"]["few slots"], result["servers"]["all resident"]
    load, registered = result["load"], result["start"]["registered"]
    seconds = {int(n): max(times) for n, times in result["start"]["seconds"].items()}
    text = (
        f"**{few['registry']['registered']:,} adapters on {result['slots']} slots, {result['shape']} model**, Zipf "
        f"traffic, {load['concurrency'][0]} at once, {_where(result)} ([data]({_link(name)})). Every answer was asked "
        f"for again, alone: {result['different']} of {few['validation']['checked']} differ. With "
        f"{registered:,} registered the server starts in {seconds[registered]:.1f} s, with 3 in {seconds[3]:.1f}.\n\n"
    ) + _head("slots", "tokens/s", "memory per adapter", "in memory", "on the device")
    for server in (few, all_of_them):
        book = server["registry"]
        text += _row(
            f"{book['slots']:,}",
            f"{server['median']['tokens_per_s']:,.0f}",
            f"{book['loaded_bytes'] / book['loaded'] / 1e6:.2f} MB",
            f"{book['loaded']:,}",
            f"{book['resident']:,}",
        )
    return text + f"\nFew slots against all resident: {result['ratio']:.2f}.\n"


def hot_swap(name: str, result: dict[str, Any]) -> str:
    """Return the table of adapters that come and go beside streams."""
    text = (
        f"**{result['adapters']} adapters come and go beside {result['streams']} running streams**, built-in model, "
        f"{_where(result)} ([data]({_link(name)})). {result['failed']} streams failed, {result['different']} had other "
        f"tokens; their 99th percentile of inter-token times was {result['p99_ratio']:.2f} of the undisturbed.\n\n"
    ) + _head("change", "p50", "p99")
    for kind, label in (("swap", "an alias moves"), ("load", "an adapter is read"), ("unload", "one is forgotten")):
        ms = result["changes"][kind]["ms"]
        text += _row(label, f"{ms['p50']:.1f} ms", f"{ms['p99']:.1f} ms")
    return text


def overload(name: str, result: dict[str, Any]) -> str:
    """Return the table of ten times the load that can be answered."""
    over, told = result["overload"], result["retry_after"]
    refusals, sizes = over["refusals"], [size / 1e6 for _, size in result["rss"]]
    text = (
        f"**Ten times the load that can be answered**, built-in model, {over['wall_s']:.0f} s, {_where(result)} "
        f"([data]({_link(name)})).\n\n"
    ) + _head("answered / peak", "refused", "p99 of refusals", "memory, first to last", "`Retry-After` kept")
    return text + _row(
        f"{result['goodput_ratio']:.2f}",
        " ".join(f"{count:,} × {status}" for status, count in over["statuses"].items() if status != "200"),
        f"{refusals['latency_ms']['p99']:.1f} ms",
        f"{sizes[0]:,.0f} to {sizes[-1]:,.0f} MB",
        f"{told['kept']} of {told['of']}",
    )


def tokenize_load(name: str, result: dict[str, Any]) -> str:
    """Return the table of long texts that are tokenised beside streams."""
    late, memory = result["livez_ms"], result["memory_mb"]
    text = (
        f"**{result['clients']} clients tokenise {result['bytes'] / 1e6:g} MB each beside {result['streams']} "
        f"streams**, built-in model, {_where(result)} ([data]({_link(name)})).\n\n"
    ) + _head("", "alone", "beside texts")
    text += _row("p99 of inter-token time, against alone", "1", f"{result['p99_ratio']:.2f}")
    for figure in ("p99", "max"):
        text += _row(f"`/livez`, {figure}", *(f"{late[run][figure]:.0f} ms" for run in ("undisturbed", "disturbed")))
    for part, label in (("front", "the front's memory"), ("together", "with the processes for templates and texts")):
        text += _row(label, *(f"{memory[when][part]:.0f} MB" for when in ("before", "peak")))
    return text


def prefix(name: str, result: dict[str, Any]) -> str:
    """Return the table of prompts with a common beginning."""
    talk, group = result.get("conversation"), result.get("group")
    text = f"**Prompts that begin alike**, {result['shape']} model, {_where(result)} ([data]({_link(name)}))."
    if talk:
        text += f" In a conversation of {len(talk['turns'])} turns {talk['cached_share']:.1%} of the prompts' tokens "
        text += "were there from the second on."
    text += "\n\n" + _head("", "computed", "found", "times")
    for row in result["first_token"]:
        asked = f"first token of {row['prompt_tokens']:,}"
        text += _row(asked, f"{row['cold_ms']:,.0f} ms", f"{row['hit_ms']:,.1f} ms", f"{row['ratio']:,.0f}")
    if not group:
        return text
    asked = f"{group['requests']} answers to one prompt of {group['prompt_tokens']:,}"
    without, found = group["without_ms"], group["with_ms"]
    return text + _row(asked, f"{without:,.0f} ms", f"{found:,.0f} ms", f"{group['ratio']:.1f}")


def learn(name: str, result: dict[str, Any]) -> str:
    """Return the table of the built-in model's learning."""
    runs = result["results"]
    text = (
        f"**The built-in model learns its weak skill over HTTP**, {runs[0]['steps']} batches of 64 answers, "
        f"{_where(result)} ([data]({_link(name)})). Mean reward of the first and the last five batches; controls learn "
        "from rewards that changed places, and with a learning rate of 0.\n\n"
    ) + _head("seed", *(run for run in dict.fromkeys(r["run"] for r in runs)), "seconds")
    for seed in sorted({r["seed"] for r in runs}):
        own = [r for r in runs if r["seed"] == seed]
        text += _row(str(seed), *(_rise(r) for r in own), f"{own[0]['seconds']:.0f}")
    return text + "\n![The curve of the first seed](docs/learn.svg)\n"


def rate(name: str, result: dict[str, Any]) -> str:
    """Return the table of learning at rates that the server has found."""
    text = (
        f"**Learning without a setting**, fresh servers with `--enable-rl-training` alone, {_where(result)} "
        f"([data]({_link(name)})). Mean reward of the first and the last five batches of 64 answers, the batch after "
        f"which that of five was {result['learned']}, the updates until the end, the lowest and highest rate from the "
        "fourth update on, and how far gradients agreed on average. `shuffled` learns the first task from rewards that "
        "changed places.\n\n"
    ) + _head("task", "seed", "mean reward", "learned after", "updates", "rates", "agreement")
    for run in result["results"]:
        rates = [update["learning_rate"] for update in run["history"][3:]]
        agreed = [update["agreement"] for update in run["history"][1:]]
        after = "–" if run["learned_after"] is None else str(run["learned_after"])
        spread = f"{min(rates):.1e} to {max(rates):.1e}"
        text += _row(
            run["run"],
            str(run["seed"]),
            _rise(run),
            after,
            str(run["updates"]),
            spread,
            f"{sum(agreed) / len(agreed):.2f}",
        )
    return text


def _rise(run: dict[str, Any]) -> str:
    return f"{run['first_five']:.2f} → {run['last_five']:.2f}"


def learn_here(name: str, result: dict[str, Any]) -> str:
    """Return the table of learning on another device, without the controls."""
    runs = result["results"]
    text = (
        f"**The same on {runs[0]['device']}**, {result['time'][:10]} ([data]({_link(name)})), "
        f"by a server that was ready after {runs[0]['server_start_s']:.0f} s.\n\n"
    ) + _head("seed", "batches", "mean reward", "seconds")
    for run in runs:
        text += _row(str(run["seed"]), str(run["steps"]), _rise(run), f"{run['seconds']:.0f}")
    return text


def guard(name: str, result: dict[str, Any]) -> str:
    """Return the table of a learning rate that is too high."""
    text = (
        f"**A learning rate eight times too high**, beside held-out prompts, {_where(result)} ([data]({_link(name)})): "
        "updates that the guard took back by itself, the rate that this left, and the share of other held-out "
        "questions that what was served answered rightly.\n\n"
    ) + _head("seed", "taken back", "rate at the end", "right at the start", "at its worst", "at the end")
    for run in result["results"]:
        served = run["served_accuracy"]
        back = f"{run['rollbacks']} of {run['updates']}"
        shares = (f"{share:.0%}" for share in (served[0], min(served), served[-1]))
        text += _row(str(run["seed"]), back, f"{run['learning_rate']:g}", *shares)
    return text


def groups(name: str, result: dict[str, Any]) -> str:
    """Return the table of learning from groups."""
    text = (
        f"**Learning from groups**, updates of {result['prompts']} × {result['rollouts']} rollouts of "
        f"{result['completion_tokens']} tokens, built-in model, {_where(result)} ([data]({_link(name)})), with the "
        "prefix cache and without.\n\n"
    ) + _head("", "without", "with", "times")
    for row in result["lengths"]:
        sides = [row["medians"][side] for side in ("without", "with")]
        for what, key, unit in (
            (f"tokens computed for prompts of {row['prompt_tokens']:,}", "computed_prompt_tokens", ""),
            ("rollouts", "rollouts_ms", " ms"),
        ):
            text += _row(what, *(f"{s[key]:,.0f}{unit}" for s in sides), f"{row['times'][key]:.1f}")
        minutes = (f"{s['updates_per_minute']:.2f}" for s in sides)
        text += _row("updates a minute", *minutes, f"{row['times']['updates_per_minute']:.2f}")
    return text


def learn_beside(name: str, result: dict[str, Any]) -> str:
    """Return the table of streams beside updates."""
    more = result.get("full_tokens", result["update_tokens"])
    sizes = f" ({more:,} at 70:30)" if more != result["update_tokens"] else ""
    text = (
        f"**{result['streams']} streams beside updates of {result['update_tokens']:,} tokens{sizes}**, "
        f"{_model(result)}, {_where(result)} ([data]({_link(name)})). {result['published']} versions were "
        f"published; {result['failed']} requests failed, {result['different']} had other tokens.\n\n"
    ) + _head("updates", "tokens/s of idle", "p50 of idle", "p99 of idle", "updates a minute", "share of the device")
    for mode, m in result["modes"].items():
        if mode != "idle":
            share = f"{m['training_share_lowest']:.3f} to {m['training_share_highest']:.3f}"
            ratios = (f"{m[k]:.2f}" for k in ("of_idle", "p50_of_idle", "p99_of_idle"))
            text += _row(mode, *ratios, f"{m['updates_per_minute']:.1f}", share)
    return text


def learn_device(name: str, result: dict[str, Any]) -> str:
    """Return the table of learning on one device, of the last round: the first one compiles."""
    agrees, alone, last = result["agreement"], result["update_alone"], result["rounds"][-1]
    idle, learning = last["idle"], last["learning"]
    text = (
        f"**Learning on one device**, {result['shape']}, {result['info']['dtype']}, {result['info']['device']}, "
        f"{result['time'][:10]} ([data]({_link(name)})): updates of {result['update_tokens']:,} tokens, an adapter of "
        f"{result['trainer_parameters'] / 1e6:.1f}M parameters, {result['streams']} streams.\n\n"
    ) + _head("sampler and trainer, k3", "a pass", "a step", "tokens/s of idle", "p99 of idle", "share of the device")
    return text + _row(
        f"{agrees['k3']:.1e} nats",
        f"{alone['pass_ms']['p50']:.0f} ms",
        f"{alone['step_ms']['p50']:.0f} ms",
        f"{learning['tokens_per_s'] / idle['tokens_per_s']:.2f}",
        f"{learning['inter_token_ms']['p99'] / idle['inter_token_ms']['p99']:.2f}",
        f"{learning['training_share']:.2f}",
    )


def learn_memory(name: str, result: dict[str, Any]) -> str:
    """Return the table of the memory of learning."""
    ways, saved = result["ways"], result["saved"]
    text = (
        f"**Memory of learning beside serving**, {result['shape']}, {result['time'][:10]} ([data]({_link(name)})).\n\n"
    )
    text += _head("", "peak", "saved against serving and this in two processes")
    text += _row("serving", f"{ways['serving']['peak_bytes'] / 1e9:.1f} GB", "")
    text += _row("serving and learning", f"{ways['both']['peak_bytes'] / 1e9:.1f} GB", "")
    for way, called in _TRAINERS:
        if way not in ways:
            continue
        text += _row(called, f"{ways[way]['peak_bytes'] / 1e9:.1f} GB", f"{saved[way]:.0%}")
    return text


_TRAINERS = (
    ("learning", "learning alone"),
    ("mlx-lm", "mlx-lm's LoRA trainer"),
    ("mlx-lm checkpointed", "the same with checkpointing"),
)


def publishes(name: str) -> str:
    """Return the tables of the page about learning."""
    if not _names(name):
        return "No figures are committed yet.\n"
    result = _read(name)
    again, modes = result["replay"], result["modes"]
    text = (
        f"{result['publishes']} versions were published beside {result['streams']} streams, built-in model, float32, "
        f"{_where(result)} ([data]({_link(name)})). Of {sum(result['requests'].values()):,} requests "
        f"{result['failed']} failed, and {result['different']} had other tokens than the same request when "
        f"nothing is learned; {result['followed']['with_several_versions']} went on under newer versions, "
        f"{result['followed']['changes']} times in all.\n\n"
    ) + _head("ms", "p50", "p99", "longest")
    times = {
        "the engine makes the version, beside what it serves": result["ready_ms"],
        "the name moves": result["swap_ms"],
        "an alias is pointed to it over HTTP": result["alias_over_http_ms"],
        "from token to token, streams alone": modes["idle"],
        "beside updates that publish nothing": modes["updates"],
        "beside updates that each publish a version": modes["publishes"],
    }
    text += "".join(_row(what, *(f"{t[k]:,.1f}" for k in ("p50", "p99", "max"))) for what, t in times.items()) + "\n"
    text += _head(
        "each token's logprob as mlx-lm computes it", "tokens", "largest difference", f"over {result['tolerance']:.0e}"
    )
    kinds = {
        "greedy": "one adapter, or none",
        "pinned": "the version that the request began with",
        "followed": "versions as they came, with what was computed so far",
    }
    for kind, what in kinds.items():
        row = again[kind]
        text += _row(f"under {what}", f"{row['tokens']:,}", f"{row['largest']:.1e} nats", str(row["over"]))
    before = result["controls"]["under_the_version_before"]
    return text + (
        f"\nThe comparison is not blind: under the version before the one that is named, {before['found']} of "
        f"{before['replies']} replies would be over, the median of their largest differences being "
        f"{before['median']:.1e} nats.\n"
    )


def _names(pattern: str) -> list[str]:
    return sorted(f.name for f in RESULTS.glob(pattern))


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def _link(name: str) -> str:
    return (RESULTS / name).relative_to(ROOT).as_posix()


def _model(result: dict[str, Any]) -> str:
    return "built-in model" if result["shape"] == "demo" else f"{result['shape']} model"


def _where(result: dict[str, Any]) -> str:
    machine, device = result["machine"], result.get("device", "CPU")
    if not device.startswith("CPU"):
        return f"{device}, {result['time'][:10]}"
    kernels = result.get("environment", {}).get("OPENBLAS_CORETYPE")
    blas = f", OpenBLAS held to its {kernels} kernels" if kernels else ""
    return f"{machine['cores']} cores of {machine['cpu']}{blas}, {result['time'][:10]}"


def _device(result: dict[str, Any]) -> str:
    return f"{result['engine']['device']}, {result['time'][:10]}"


def _head(*cells: str) -> str:
    return _row(*cells) + "|" + "---:|" * len(cells) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _from(page: Path, text: str) -> str:
    """Return the text with links that are right on this page instead of in the repository's root."""
    if page.parent == ROOT:
        return text
    return text.replace("](benchmarks/", "](../benchmarks/").replace("](docs/", "](")


def rewritten(page: Path, text: str) -> str:
    """Return the page with today's figures in it."""
    before, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"{page.name} has no place for the figures: {BEGIN.strip()} … {END.strip()}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def draw() -> None:
    """Draw the pictures; equal results give equal bytes."""
    import matplotlib

    from mlx_tandem.cli.bench.plot import plot
    from mlx_tandem.cli.demo.chart import svg

    with matplotlib.rc_context({"svg.hashsalt": PICTURE.name}):
        plot(_read(PICTURE_OF), PICTURE)
    run = _read(CURVE_OF)["results"][0]
    title = f"mean reward, {_rise(run)} in {run['steps']} batches and {run['seconds']:.0f} s"
    CURVE.write_text(svg(run["rewards"], title=title, below=f"benchmarks/results/{CURVE_OF}"), encoding="utf-8")


def main() -> None:
    """Write the pages, or with --check only compare them."""
    texts = {PAGE: highlights(), ALL: figures(), LEARNING: publishes(PUBLISHES), PERFORMANCE: performance()}
    pages = {page: rewritten(page, _from(page, text)) for page, text in texts.items()}
    if "--check" in sys.argv:
        old = [page.name for page, new in pages.items() if page.read_text(encoding="utf-8") != new]
        sys.exit(f"{old[0]}: the figures are not those of benchmarks/results; run make figures" if old else 0)
    for page, new in pages.items():
        page.write_text(new, encoding="utf-8")
    draw()


if __name__ == "__main__":
    main()
