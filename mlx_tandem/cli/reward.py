"""`tandem train reward` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mlx_tandem.cli import outputs
from mlx_tandem.cli.console import fail, say
from mlx_tandem.cli.sft import with_option

_DATA, _ADAPTER, _COURSE, _REPORT = "Data", "Adapter", "Course", "Report"


def reward(
    ctx: typer.Context,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help='JSONL, a line each: {"prompt": …, "chosen": …, "rejected": …}, texts or lists of messages.',
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Folder or hub id; the built-in one.")] = None,
    adapter_out: Annotated[
        Path | None, typer.Option(help="New folder for the adapter (./<name of DATA>-adapter).")
    ] = None,
    valid: Annotated[Path | None, typer.Option(help="JSONL file of held-out pairs.", rich_help_panel=_DATA)] = None,
    valid_share: Annotated[
        float | None, typer.Option(help="Share of DATA held out without --valid (0.1).", rich_help_panel=_DATA)
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt with an answer; longer pairs are left out (2048).", rich_help_panel=_DATA
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts and answers are plain text, not chat turns.", rich_help_panel=_DATA)
    ] = False,
    init_from: Annotated[
        Path | None,
        typer.Option(help="Adapter folder to begin with; its rank, scale and layers apply.", rich_help_panel=_ADAPTER),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", "--lora-rank", help="Rank of the adapter (16).", rich_help_panel=_ADAPTER)
    ] = None,
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
            help="Passes over all pairs; if absent, until the held-out loss no longer falls.", rich_help_panel=_COURSE
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Pairs per step.", rich_help_panel=_COURSE)] = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", rich_help_panel=_COURSE)] = 2e-4,
    weight_decay: Annotated[float, typer.Option(rich_help_panel=_COURSE)] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(help="0: gradients are not clipped.", rich_help_panel=_COURSE)] = 1.0,
    seed: Annotated[int, typer.Option(rich_help_panel=_COURSE)] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the unfinished run of --adapter-out.", rich_help_panel=_COURSE)
    ] = False,
    report_to: Annotated[
        str, typer.Option(help="Trackers: tensorboard, wandb, trackio; with commas.", rich_help_panel=_REPORT)
    ] = "",
    json_out: Annotated[
        Path | None, typer.Option(callback=outputs.checked, help="Write all figures here.", rich_help_panel=_REPORT)
    ] = None,
) -> None:
    """Train a reward model: an adapter with a score head that learns from preferences. The state that ranks held-out
    pairs best is kept.
    """
    from mlx_tandem.cli import hub
    from mlx_tandem.cli.finetune import REWARD, Adapter, Data, Job, Records, default_out
    from mlx_tandem.errors import TandemError
    from mlx_tandem.training.metrics.writer import trackers
    from mlx_tandem.training.sft import SftConfig

    if valid is not None and valid_share is not None:
        raise typer.BadParameter("held-out pairs come from a file or from DATA, not both", param_hint="--valid")
    job = None
    try:
        config = SftConfig(
            epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, weight_decay=weight_decay,
            grad_norm=max_grad_norm, seed=seed,
        )  # fmt: skip
        asked = {"rank": rank, "alpha": alpha, "targets": tuple(targets.split(",")) if targets else None}
        share = 0.0 if valid is not None else 0.1 if valid_share is None else valid_share
        job = Job(
            REWARD,
            Data(data, valid, share, max_length, raw),
            model,
            adapter_out or default_out(data),
            Adapter(asked, init_from),
            dtype,
            config,
            Records(None, trackers(report_to), 0),
            resume,
        )
        found = job.run()
        if json_out is not None:
            from mlx_tandem.cli.bench.machine import describe

            outputs.write_json(json_out, describe() | found)
    except TandemError as e:
        fail(with_option(ctx, e))
    except hub.HubError as e:
        fail(f"{e} (--model)")
    except OSError as e:
        fail(str(e))
    except KeyboardInterrupt:
        say("stopped" if job is None else job.stopped())
        raise SystemExit(130) from None
