"""`tandem train sft` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_tandem.cli import outputs
from mlx_tandem.cli.adapters import Server, load_adapter
from mlx_tandem.cli.console import fail, say
from mlx_tandem.cli.options import with_flag
from mlx_tandem.cli.training_options import (
    ADAPTER,
    COURSE,
    DATA,
    REPORT,
    AdapterOut,
    Alpha,
    Dtype,
    InitFrom,
    JsonOut,
    LearningRate,
    MaxGradNorm,
    Model,
    Rank,
    ReportTo,
    Resume,
    Seed,
    Targets,
    ValidShare,
    WeightDecay,
)
from mlx_tandem.training.schedules import ScheduleKind

if TYPE_CHECKING:
    from mlx_tandem.errors import TandemError


def sft(
    ctx: typer.Context,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help='JSONL, a line each: {"messages": …}, {"prompt": …, "completion": …} or {"text": …}; or captain, '
            "an example for the built-in model.",
        ),
    ],
    model: Model = None,
    adapter_out: AdapterOut = None,
    valid: Annotated[Path | None, typer.Option(help="JSONL file of held-out examples.", rich_help_panel=DATA)] = None,
    valid_share: ValidShare = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of one example; the rest is cut off (2048).",
            rich_help_panel=DATA,
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Prompts and completions are plain text, not chat turns.", rich_help_panel=DATA),
    ] = False,
    init_from: InitFrom = None,
    rank: Rank = None,
    alpha: Alpha = None,
    targets: Targets = "",
    rslora: Annotated[
        bool,
        typer.Option("--rslora", help="Scale by alpha / sqrt(rank), not alpha / rank.", rich_help_panel=ADAPTER),
    ] = False,
    plus_ratio: Annotated[
        float, typer.Option(help="LoRA+: learning rate of B over that of A.", rich_help_panel=ADAPTER)
    ] = 1.0,
    dropout: Annotated[
        float, typer.Option(help="Share of A's inputs left out at random.", rich_help_panel=ADAPTER)
    ] = 0.0,
    dtype: Dtype = "auto",
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Passes over all examples; if absent, until the held-out loss no longer falls.",
            rich_help_panel=COURSE,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Examples per batch.", rich_help_panel=COURSE)] = 8,
    batch_tokens: Annotated[
        int, typer.Option(help="Most tokens per batch; 0: any number.", rich_help_panel=COURSE)
    ] = 0,
    accumulate: Annotated[int, typer.Option(help="Batches per step.", rich_help_panel=COURSE)] = 1,
    learning_rate: LearningRate = 2e-4,
    schedule: Annotated[
        ScheduleKind | None,
        typer.Option(help="Course of the learning rate (cosine; constant without --epochs).", rich_help_panel=COURSE),
    ] = None,
    rate_floor: Annotated[
        float, typer.Option(help="Share of the learning rate that a schedule ends at.", rich_help_panel=COURSE)
    ] = 0.0,
    warmup_share: Annotated[
        float,
        typer.Option(
            help="Share of the steps in which the rate rises (of an epoch's without --epochs).", rich_help_panel=COURSE
        ),
    ] = 0.05,
    weight_decay: WeightDecay = 0.0,
    max_grad_norm: MaxGradNorm = 1.0,
    eval_every: Annotated[
        int, typer.Option(help="Steps between evaluations of held-out examples (an epoch).", rich_help_panel=COURSE)
    ] = 0,
    patience: Annotated[
        int,
        typer.Option(help="End after so many evaluations without a fall of the loss.", rich_help_panel=COURSE),
    ] = 0,
    least_fall: Annotated[
        float, typer.Option(help="Nats per token that count as a fall.", rich_help_panel=COURSE)
    ] = 1e-3,
    seed: Seed = 0,
    resume: Resume = False,
    save_every: Annotated[
        int,
        typer.Option(help="Steps between saved states for --resume (each evaluation).", rich_help_panel=COURSE),
    ] = 0,
    metrics_file: Annotated[
        Path | None,
        typer.Option(
            callback=outputs.checked,
            help="JSONL file of metrics (metrics.jsonl in the adapter's folder).",
            rich_help_panel=REPORT,
        ),
    ] = None,
    report_to: ReportTo = "",
    samples: Annotated[
        int, typer.Option(help="Held-out examples answered at each evaluation.", rich_help_panel=REPORT)
    ] = 0,
    json_out: JsonOut = None,
    load_into: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Have this running server load the adapter at the end.", rich_help_panel=REPORT
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=outputs.picture,
            help="Draw the losses into this .png or .svg file (matplotlib).",
            rich_help_panel=REPORT,
        ),
    ] = None,
) -> None:
    """Teach an adapter from examples (supervised fine-tuning). The state that does best on held-out examples is
    kept.
    """
    from mlx_tandem.cli import hub
    from mlx_tandem.cli.finetune import SFT, Adapter, Data, Job, Records, default_out, draw, find_data
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
            Data(find_data(data), valid, share, max_length, raw),
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
        if load_into is not None:
            load_adapter(Server(load_into, None, None, None), job.out.absolute())
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
