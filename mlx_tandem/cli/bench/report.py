"""Tables of results for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from mlx_tandem.cli.bench.figures import overheads
from mlx_tandem.cli.bench.sides import BASE, NAMES, label, ran


def serve_table(result: dict[str, Any]) -> RenderableType:
    """Return the medians of `tandem bench serve`: throughput, times, and how the modes compare."""
    parts: list[RenderableType] = [_throughput(result), "", _times(result)]
    if result["ratios"]:
        parts += ["", _ratios(result["ratios"])]
    if checked := result["validation"]:
        parts.append(
            f"\nchecked against each adapter alone, {checked['compared']}: {checked['checked']} of "
            f"{checked['answers']} answers, {checked['adapters']} models, {checked['different']} different"
        )
        parts += [f"  {difference}" for difference in checked["differences"]]
    return Group(*parts)


def _table(title: str, *columns: str, left: Sequence[str] = ()) -> Table:
    """Return an empty table that is as narrow as its texts; columns that are not `left` are aligned to the right."""
    table = Table(title=title or None, title_style="", title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def _throughput(result: dict[str, Any]) -> RenderableType:
    load = result["load"]
    length = "" if load["profile"] else f"{load['max_tokens']} tokens each, "
    title = f"{load['url']}, {length}median of {load['repeats']}"
    table = _table(title, "at once", "mode", "tok/s", "change", "events/s", "wall", "requests", left=["mode"])
    percent, below = overheads(result["ratios"]), list[RenderableType]()
    for row in result["results"]:
        m, level, mode = row["median"], row["concurrency"], row["mode"]
        refused = Counter[str]()
        errors = Counter[str]()
        for r in row["rounds"]:
            refused.update((r["refusals"] or {}).get("statuses", {}))
            errors.update(r["error_kinds"])
        table.add_row(
            str(level),
            mode,
            f"{m['tokens_per_s']:,.0f}",
            f"{percent[level, mode]:+.0f}%" if (level, mode) in percent else "",
            f"{m['events_per_s']:,.0f}",
            f"{m['wall_s']:,.1f} s",
            str(sum(r["requests"] for r in row["rounds"])),
        )
        for what, counts in (("refused", refused), ("errors", errors)):
            if counts:
                below.append(f"{level} at once, {mode}, {what}: {_counts(counts)}")
    return Group(table, *below) if below else Group(table, "nothing was refused, and there were no errors")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{n} × {kind}" for kind, n in counts.items())


def _times(result: dict[str, Any]) -> Table:
    columns = ("at once", "mode", "milliseconds", "mean", "p50", "p95", "p99")
    table = _table("", *columns, left=["mode", "milliseconds"])
    kinds = {"latency_ms": "request", "ttft_ms": "first token", "inter_token_ms": "inter-token"}
    for row in result["results"]:
        for i, (kind, called) in enumerate(kinds.items()):
            about = ("", "") if i else (str(row["concurrency"]), row["mode"])
            times = row["median"][kind]
            table.add_row(*about, called, *(_short(times[p]) for p in ("mean", "p50", "p95", "p99")))
    return table


def _short(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _ratios(ratios: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(key for row in ratios for key in row if key != "concurrency"))
    table = _table(
        "", "throughput ratios", *(f"{row['concurrency']} at once" for row in ratios), left=["throughput ratios"]
    )
    for name in names:
        cells = (f"{row[name]:.2f}" if name in row else "" for row in ratios)
        table.add_row(name.replace("long-decode", "long"), *cells)
    return table


def engine_table(result: dict[str, Any]) -> RenderableType:
    """Return the medians of `tandem bench engine`: a line for each batch and side."""
    load = result["load"]
    title = f"{result['model']}, {load['max_tokens']} tokens each, median of {load['repeats']}"
    speed = _table(title, "batch", "", "tok/s", "of tandem", "ms/step", "floor", "bandwidth", left=[""])
    loop = ("closed loop",) if load["num_requests"] else ()
    rest = _table("", "batch", "", "MB/step", "prompts", *loop, left=[""])
    for row in result["results"]:
        base = row[BASE]["decode_tokens_per_s"]
        for side in ran(row):
            m, name = row[side], (label(row) if side == BASE else "", NAMES[side])
            speed.add_row(
                *name,
                f"{m['decode_tokens_per_s']:,.0f}",
                f"{m['decode_tokens_per_s'] / base:.2f}" if side != BASE and base else "",
                f"{m['step_ms']:.2f}",
                f"{m['floor_ms']:.2f}",
                f"{m['bandwidth_share']:.0%}",
            )
            rest.add_row(
                *name,
                f"{(m['weight_bytes'] + m['cache_bytes'] + m['adapter_bytes']) / 1e6:,.1f}",
                f"{m['prefill_ms']:,.1f} ms",
                *((f"{m['loop_tokens_per_s']:,.0f} tok/s",) if "loop_tokens_per_s" in m else ()),
            )
    return Group(speed, "", rest)
