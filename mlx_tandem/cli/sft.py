"""`tandem train sft` and its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from mlx_tandem.cli.console import fail

_DATA, _ADAPTER, _COURSE, _REPORT = "Data", "Adapter", "Course", "Report"


def sft(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help='JSONL, a line each: {"messages": …}, {"prompt": …, "completion": …} or {"text": …}.',
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Folder or hub id; the built-in one.")] = None,
    adapter_out: Annotated[
        Path | None, typer.Option(help="New folder for the adapter (./<name of DATA>-adapter).")
    ] = None,
    valid: Annotated[Path | None, typer.Option(help="JSONL file of held-out examples.", rich_help_panel=_DATA)] = None,
    valid_share: Annotated[
        float | None, typer.Option(help="Share of DATA held out without --valid (0.1).", rich_help_panel=_DATA)
    ] = None,
    max_length: Annotated[
        int, typer.Option(help="Tokens of one example; the rest is cut off.", rich_help_panel=_DATA)
    ] = 2048,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Prompts and completions are plain text, not chat turns.", rich_help_panel=_DATA),
    ] = False,
    rank: Annotated[int, typer.Option("--rank", "--lora-rank", rich_help_panel=_ADAPTER)] = 16,
    alpha: Annotated[
        float | None, typer.Option("--alpha", "--lora-alpha", help="Default: twice the rank.", rich_help_panel=_ADAPTER)
    ] = None,
    targets: Annotated[
        str, typer.Option(help="Linear layers such as q_proj,v_proj (all).", rich_help_panel=_ADAPTER)
    ] = "",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the base model.", rich_help_panel=_ADAPTER),
    ] = "auto",
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Passes over all examples; if absent, until the held-out loss no longer falls.",
            rich_help_panel=_COURSE,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Examples per batch.", rich_help_panel=_COURSE)] = 8,
    batch_tokens: Annotated[
        int, typer.Option(help="Most tokens per batch; 0: any number.", rich_help_panel=_COURSE)
    ] = 0,
    accumulate: Annotated[int, typer.Option(help="Batches per step.", rich_help_panel=_COURSE)] = 1,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", rich_help_panel=_COURSE)] = 2e-4,
    warmup_share: Annotated[
        float,
        typer.Option(
            help="Share of the steps in which the rate rises (of an epoch's without --epochs).", rich_help_panel=_COURSE
        ),
    ] = 0.05,
    weight_decay: Annotated[float, typer.Option(rich_help_panel=_COURSE)] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(help="0: gradients are not clipped.", rich_help_panel=_COURSE)] = 1.0,
    eval_every: Annotated[
        int, typer.Option(help="Steps between evaluations of held-out examples (an epoch).", rich_help_panel=_COURSE)
    ] = 0,
    seed: Annotated[int, typer.Option(rich_help_panel=_COURSE)] = 0,
    json_out: Annotated[Path | None, typer.Option(help="Write all figures here.", rich_help_panel=_REPORT)] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the losses into this .png or .svg file (matplotlib).", rich_help_panel=_REPORT),
    ] = None,
) -> None:
    """Teach an adapter from examples (supervised fine-tuning). The state that does best on held-out examples is
    kept.
    """
    from mlx_tandem import demo
    from mlx_tandem.cli import hub
    from mlx_tandem.cli.bench.plot import SUFFIXES, MissingLibrary, require
    from mlx_tandem.cli.finetune import Job, draw
    from mlx_tandem.errors import TandemError
    from mlx_tandem.training.sft import SftConfig

    if plot is not None and plot.suffix not in SUFFIXES:
        raise typer.BadParameter(f"'{plot.name}' ends neither in .png nor in .svg", param_hint="--plot")
    if valid is not None and valid_share is not None:
        raise typer.BadParameter("held-out examples come from a file or from DATA, not both", param_hint="--valid")
    try:
        if plot is not None:
            require()
        base = str(demo.MODEL_PATH) if model is None else str(hub.find(model, "model").folder)
        config = SftConfig(
            epochs, batch_size, batch_tokens, accumulate, learning_rate, warmup_share, weight_decay, max_grad_norm,
            eval_every, seed,
        )  # fmt: skip
        job = Job(
            data,
            base,
            adapter_out or Path(f"{data.stem}-adapter"),
            valid,
            0.0 if valid is not None else 0.1 if valid_share is None else valid_share,
            max_length,
            raw,
            {"rank": rank, "alpha": alpha, "targets": tuple(targets.split(",")) if targets else ()},
            dtype,
            config,
        )
        found = job.run()
        if json_out is not None:
            from mlx_tandem.cli.bench.machine import describe

            json_out.write_text(json.dumps(describe() | found, indent=2) + "\n", encoding="utf-8")
        if plot is not None:
            draw(found, plot)
    except (TandemError, hub.HubError, MissingLibrary, OSError) as e:
        fail(str(e))
