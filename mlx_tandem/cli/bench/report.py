"""Tables of results for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table


def serve_table(result: dict[str, Any]) -> RenderableType:
    """Medians of `tandem bench serve`, and the ratios between its modes."""
    load = result["load"]
    table = Table(title=f"{load['url']}, {load['max_tokens']} tokens each, median of {load['repeats']}", title_style="")
    for column in ("at once", "mode", "tok/s", "events/s", "first token p50", "p99", "inter-token p50", "p99"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    table.add_column("latency p50", justify="right")
    table.add_column("errors", justify="right")
    for row in result["results"]:
        m = row["median"]
        table.add_row(
            str(row["concurrency"]),
            row["mode"],
            f"{m['tokens_per_s']:,.0f}",
            f"{m['events_per_s']:,.0f}",
            f"{m['ttft_ms']['p50']:.1f} ms",
            f"{m['ttft_ms']['p99']:.1f}",
            f"{m['inter_token_ms']['p50']:.2f} ms",
            f"{m['inter_token_ms']['p99']:.2f}",
            f"{m['latency_ms']['p50']:,.0f} ms",
            str(sum(r["errors"] for r in row["rounds"])),
        )
    parts: list[RenderableType] = [table]
    if result["ratios"]:
        columns = list(dict.fromkeys(key for row in result["ratios"] for key in row if key != "concurrency"))
        table = Table(title="throughput ratios", title_style="")
        table.add_column("at once", justify="right")
        for column in columns:
            table.add_column(column, justify="right")
        for row in result["ratios"]:
            table.add_row(str(row["concurrency"]), *(f"{row[c]:.2f}" if c in row else "" for c in columns))
        parts.append(table)
    return Group(*parts)


def engine_table(result: dict[str, Any]) -> RenderableType:
    """Medians of `tandem bench engine`."""
    table = Table(title=f"{result['model']}, {result['max_tokens']} tokens each, tokens per second", title_style="")
    table.add_column("batch", justify="right")
    for kind in ("decode", "prefill", "total"):
        for column in (f"{kind} tandem", "BatchGenerator", "ratio"):
            table.add_column(column, justify="right")
    for row in result["results"]:
        cells = [str(row["batch"])]
        for kind in ("decode", "prefill", "total"):
            cells += [f"{row[side][f'{kind}_tokens_per_s']:,.0f}" for side in ("tandem", "batch_generator")]
            cells.append(f"{row['ratio'][kind]:.2f}")
        table.add_row(*cells)
    return table
