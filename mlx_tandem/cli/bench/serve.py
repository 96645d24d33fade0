"""`tandem bench serve`: measures a running server under streaming load.

Every round keeps `concurrency` requests under way until all are answered. The modes take turns round by round, so
that other load on the machine affects them alike and their ratios are fair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_tandem.cli.bench.client import BenchError, Client, run_loop
from mlx_tandem.cli.bench.figures import ratios
from mlx_tandem.cli.bench.left import Left
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.stats import median
from mlx_tandem.cli.bench.validation import Validation
from mlx_tandem.cli.bench.workloads import Load, Phase, phases
from mlx_tandem.cli.outputs import write_json
from mlx_tandem.files import StorageError
from mlx_tandem.http_client import HttpError


def run(load: Load, json_out: Path | None, plot_out: Path | None = None) -> None:
    """Measure, show tables and write the files.

    End the process with status 1 if nothing could be measured, or if an answer under load differs from the answer
    alone.
    """
    from mlx_tandem.cli.bench.plot import plot
    from mlx_tandem.cli.bench.report import serve_table
    from mlx_tandem.cli.console import fail, show

    try:
        result = measure(load, progress=lambda line: print(line, file=sys.stderr, flush=True))
    except BenchError as e:
        fail(str(e))
    except HttpError as e:
        fail(f"{e} (--url)")
    show(serve_table(result))
    try:
        if json_out:
            write_json(json_out, result)
        if plot_out:
            plot(result, plot_out)
    except StorageError as e:
        fail(e.message)
    if (checked := result["validation"]) and checked["different"]:
        fail(f"{checked['different']} of {checked['checked']} answers differ from their adapter alone")


def measure(load: Load, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Return all rounds of `load` as plain data: raw figures per round, medians, ratios between the modes."""
    return run_loop(_measure(load, progress))


async def _measure(load: Load, progress: Callable[[str], None]) -> dict[str, Any]:
    client = await Client.open(load)
    validation = Validation(client) if load.validate else None
    rounds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    todo = phases(load, client.adapters)
    left = Left(sum(len(phase.workloads) for phase in todo) * load.repeats)
    for phase in todo:
        await _measure_phase(client, phase, rounds, validation, lambda line: progress(f"{line}  {left.after()}"))
    checked = await validation.check(load.validation_sample, progress) if validation else None
    client.close()
    results = [
        {"concurrency": c, "mode": mode, "median": median(raw), "rounds": raw} for (c, mode), raw in rounds.items()
    ]
    return describe() | {
        "load": asdict(load) | {"adapters": client.adapters, "api_key": bool(load.api_key)},
        "server": client.server,
        "results": results,
        "ratios": ratios(rounds),
        "validation": checked,
    }


async def _measure_phase(
    client: Client,
    phase: Phase,
    rounds: dict[tuple[int, str], list[dict[str, Any]]],
    validation: Validation | None,
    progress: Callable[[str], None],
) -> None:
    """Run every workload `repeats` times after a short warm-up round each; which one begins changes from round to
    round.
    """
    workloads, repeats = phase.workloads, client.load.repeats
    for workload in workloads:
        await client.round(workload, phase.concurrency, warm_up=True)
    for repeat in range(repeats):
        turn = repeat % len(workloads)
        for workload in workloads[turn:] + workloads[:turn]:
            done = await client.round(workload, phase.concurrency)
            figures = done.figures()
            rounds.setdefault((phase.concurrency, workload.name), []).append(figures)
            if validation:
                validation.note(done)
            progress(
                f"{repeat + 1}/{repeats} {phase.concurrency:>4} at once  {workload.name:<17} "
                f"{figures['tokens_per_s']:>9,.0f} tok/s"
                + (f"  {figures['refused']} refused" if figures["refused"] else "")
                + (f"  {figures['errors']} errors: {figures['first_error']}" if figures["errors"] else "")
            )
