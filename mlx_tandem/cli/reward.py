"""`tandem train reward` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_tandem.cli import outputs
from mlx_tandem.cli.console import fail, say
from mlx_tandem.cli.sft import with_option
from mlx_tandem.cli.training_options import (
    COURSE,
    DATA,
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


def reward(
    ctx: typer.Context,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help='JSONL, a line each: {"prompt": …, "chosen": …, "rejected": …}, texts or lists of messages.',
        ),
    ],
    model: Model = None,
    adapter_out: AdapterOut = None,
    valid: Annotated[Path | None, typer.Option(help="JSONL file of held-out pairs.", rich_help_panel=DATA)] = None,
    valid_share: ValidShare = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a prompt with an answer; longer pairs are left out (2048).", rich_help_panel=DATA),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts and answers are plain text, not chat turns.", rich_help_panel=DATA)
    ] = False,
    init_from: InitFrom = None,
    rank: Rank = None,
    alpha: Alpha = None,
    targets: Targets = "",
    dtype: Dtype = "auto",
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Passes over all pairs; if absent, until the held-out loss no longer falls.", rich_help_panel=COURSE
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Pairs per step.", rich_help_panel=COURSE)] = 8,
    learning_rate: LearningRate = 2e-4,
    weight_decay: WeightDecay = 0.0,
    max_grad_norm: MaxGradNorm = 1.0,
    seed: Seed = 0,
    resume: Resume = False,
    report_to: ReportTo = "",
    json_out: JsonOut = None,
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
