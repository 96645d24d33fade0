"""Tables of results for the terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from mlx_tandem.cli.bench.figures import overheads
from mlx_tandem.cli.bench.sides import BASE, NAMES, label, ran


def serve_table(result: dict[str, Any]) -> RenderableType:
    """Return the medians of `tandem bench serve`: throughput, times, and how the modes compare."""
    parts: list[RenderableType] = [_throughput(result), _times(result)]
    if result["ratios"]:
        parts.append(_ratios(result["ratios"]))
    if checked := result["validation"]:
        parts.append(
            f"checked against each adapter alone, {checked['compared']}: {checked['checked']} of "
            f"{checked['answers']} answers, {checked['adapters']} models, {checked['different']} different"
        )
        parts += [f"  {difference}" for difference in checked["differences"]]
    return Group(*parts)


def _throughput(result: dict[str, Any]) -> Table:
    load = result["load"]
    length = "" if load["profile"] else f"{load['max_tokens']} tokens each, "
    table = Table(title=f"{load['url']}, {length}median of {load['repeats']}", title_style="")
    for column in ("at once", "mode", "tok/s", "to one adapter", "events/s", "wall", "requests", "refused", "errors"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    percent = overheads(result["ratios"])
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
            _counts(refused),
            _counts(errors),
        )
    return table


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{n} × {kind}" for kind, n in counts.items()) or "0"


def _times(result: dict[str, Any]) -> Table:
    table = Table(title="milliseconds: mean, p50, p95, p99", title_style="")
    for column in ("at once", "mode", "request", "first token", "inter-token"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in result["results"]:
        times = (row["median"][kind] for kind in ("latency_ms", "ttft_ms", "inter_token_ms"))
        cells = ("  ".join(_short(t[p]) for p in ("mean", "p50", "p95", "p99")) for t in times)
        table.add_row(str(row["concurrency"]), row["mode"], *cells)
    return table


def _short(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _ratios(ratios: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for row in ratios for key in row if key != "concurrency"))
    table = Table(title="throughput ratios", title_style="")
    table.add_column("at once", justify="right")
    for column in columns:
        table.add_column(column.replace("long-decode", "long"), justify="right")
    for row in ratios:
        table.add_row(str(row["concurrency"]), *(f"{row[c]:.2f}" if c in row else "" for c in columns))
    return table


def engine_table(result: dict[str, Any]) -> RenderableType:
    """Return the medians of `tandem bench engine`: a line for each batch and side."""
    load = result["load"]
    title = f"{result['model']}, {load['max_tokens']} tokens each, median of {load['repeats']}"
    table = Table(title=title, title_style="")
    columns = ("batch", "", "tok/s", "of tandem", "ms/step", "floor", "MB/step", "bandwidth", "prompts")
    loop = ("closed loop",) if load["num_requests"] else ()
    for column in columns + loop:
        table.add_column(column, justify="left" if not column else "right")
    for row in result["results"]:
        base = row[BASE]["decode_tokens_per_s"]
        for side in ran(row):
            m = row[side]
            moved = m["weight_bytes"] + m["cache_bytes"] + m["adapter_bytes"]
            table.add_row(
                label(row) if side == BASE else "",
                NAMES[side],
                f"{m['decode_tokens_per_s']:,.0f}",
                f"{m['decode_tokens_per_s'] / base:.2f}" if side != BASE and base else "",
                f"{m['step_ms']:.2f}",
                f"{m['floor_ms']:.2f}",
                f"{moved / 1e6:,.1f}",
                f"{m['bandwidth_share']:.0%}",
                f"{m['prefill_ms']:,.1f} ms",
                *((f"{m['loop_tokens_per_s']:,.0f} tok/s",) if "loop_tokens_per_s" in m else ()),
            )
    return table
