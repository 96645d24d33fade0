"""`tandem train sft` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mlx_tandem.cli import outputs
from mlx_tandem.cli.console import fail, say
from mlx_tandem.cli.options import with_flag
from mlx_tandem.training.schedules import ScheduleKind

if TYPE_CHECKING:
    from mlx_tandem.errors import TandemError

_DATA, _ADAPTER, _COURSE, _REPORT = "Data", "Adapter", "Course", "Report"


def sft(
    ctx: typer.Context,
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
        int | None,
        typer.Option(
            help="Tokens of one example; the rest is cut off (2048).",
            rich_help_panel=_DATA,
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Prompts and completions are plain text, not chat turns.", rich_help_panel=_DATA),
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
    rslora: Annotated[
        bool,
        typer.Option("--rslora", help="Scale by alpha / sqrt(rank), not alpha / rank.", rich_help_panel=_ADAPTER),
    ] = False,
    plus_ratio: Annotated[
        float, typer.Option(help="LoRA+: learning rate of B over that of A.", rich_help_panel=_ADAPTER)
    ] = 1.0,
    dropout: Annotated[
        float, typer.Option(help="Share of A's inputs left out at random.", rich_help_panel=_ADAPTER)
    ] = 0.0,
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
    schedule: Annotated[
        ScheduleKind | None,
        typer.Option(help="Course of the learning rate (cosine; constant without --epochs).", rich_help_panel=_COURSE),
    ] = None,
    rate_floor: Annotated[
        float, typer.Option(help="Share of the learning rate that a schedule ends at.", rich_help_panel=_COURSE)
    ] = 0.0,
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
    patience: Annotated[
        int,
        typer.Option(help="End after so many evaluations without a fall of the loss.", rich_help_panel=_COURSE),
    ] = 0,
    least_fall: Annotated[
        float, typer.Option(help="Nats per token that count as a fall.", rich_help_panel=_COURSE)
    ] = 1e-3,
    seed: Annotated[int, typer.Option(rich_help_panel=_COURSE)] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the unfinished run of --adapter-out.", rich_help_panel=_COURSE)
    ] = False,
    save_every: Annotated[
        int,
        typer.Option(help="Steps between saved states for --resume (each evaluation).", rich_help_panel=_COURSE),
    ] = 0,
    metrics_file: Annotated[
        Path | None,
        typer.Option(
            callback=outputs.checked,
            help="JSONL file of metrics (metrics.jsonl in the adapter's folder).",
            rich_help_panel=_REPORT,
        ),
    ] = None,
    report_to: Annotated[
        str, typer.Option(help="Trackers: tensorboard, wandb, trackio; with commas.", rich_help_panel=_REPORT)
    ] = "",
    samples: Annotated[
        int, typer.Option(help="Held-out examples answered at each evaluation.", rich_help_panel=_REPORT)
    ] = 0,
    json_out: Annotated[
        Path | None, typer.Option(callback=outputs.checked, help="Write all figures here.", rich_help_panel=_REPORT)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=outputs.picture,
            help="Draw the losses into this .png or .svg file (matplotlib).",
            rich_help_panel=_REPORT,
        ),
    ] = None,
) -> None:
    """Teach an adapter from examples (supervised fine-tuning). The state that does best on held-out examples is
    kept.
    """
    from mlx_tandem.cli import hub
    from mlx_tandem.cli.finetune import SFT, Adapter, Data, Job, Records, default_out, draw
    from mlx_tandem.errors import TandemError
    from mlx_tandem.training.metrics.writer import trackers
    from mlx_tandem.training.sft import SftConfig

    if valid is not None and valid_share is not None:
        raise typer.BadParameter("held-out examples come from a file or from DATA, not both", param_hint="--valid")
    job = None
    try:
        config = SftConfig(
            epochs=epochs, batch_size=batch_size, batch_tokens=batch_tokens, accumulate=accumulate,
            learning_rate=learning_rate, schedule=schedule, rate_floor=rate_floor, warmup_share=warmup_share,
            weight_decay=weight_decay, grad_norm=max_grad_norm, eval_every=eval_every, patience=patience,
            least_fall=least_fall, seed=seed,
        )  # fmt: skip
        asked = {
            "rank": rank, "alpha": alpha, "targets": tuple(targets.split(",")) if targets else None,
            "rslora": rslora, "plus_ratio": plus_ratio, "dropout": dropout,
        }  # fmt: skip
        share = 0.0 if valid is not None else 0.1 if valid_share is None else valid_share
        job = Job(
            SFT,
            Data(data, valid, share, max_length, raw),
            model,
            adapter_out or default_out(data),
            Adapter(asked, init_from),
            dtype,
            config,
            Records(metrics_file, trackers(report_to), samples),
            resume,
            save_every,
        )
        found = job.run()
        if json_out is not None:
            from mlx_tandem.cli.bench.machine import describe

            outputs.write_json(json_out, describe() | found)
        if plot is not None:
            draw(found, plot)
    except TandemError as e:
        fail(with_option(ctx, e))
    except hub.HubError as e:
        fail(f"{e} (--model)")
    except OSError as e:
        fail(str(e))
    except KeyboardInterrupt:
        say("stopped" if job is None else job.stopped())
        raise SystemExit(130) from None


def with_option(ctx: typer.Context, error: TandemError) -> str:
    """Return the message of an error, and add the option that it is about if the message names none."""
    flags: dict[str | None, str] = {
        param.name: param.opts[0] for param in ctx.command.params if param.opts[0].startswith("-")
    }
    flag = flags.get("max_grad_norm" if error.param == "grad_norm" else error.param)
    return with_flag(error.message, flag)
