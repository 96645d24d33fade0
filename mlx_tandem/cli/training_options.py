"""Options that the commands which train on a file have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mlx_tandem.cli import outputs

DATA, ADAPTER, COURSE, REPORT = "Data", "Adapter", "Course", "Report"
"""Sections of the help."""

Model = Annotated[str | None, typer.Option("--model", "-m", help="Folder or hub id; the built-in one.")]
AdapterOut = Annotated[Path | None, typer.Option(help="New folder for the adapter (./<name of DATA>-adapter).")]
ValidShare = Annotated[
    float | None, typer.Option(help="Share of DATA held out without --valid (0.1).", rich_help_panel=DATA)
]
InitFrom = Annotated[
    Path | None,
    typer.Option(help="Adapter folder to begin with; its rank, scale and layers apply.", rich_help_panel=ADAPTER),
]
Rank = Annotated[
    int | None, typer.Option("--rank", "--lora-rank", help="Rank of the adapter (16).", rich_help_panel=ADAPTER)
]
Alpha = Annotated[
    float | None, typer.Option("--alpha", "--lora-alpha", help="Default: twice the rank.", rich_help_panel=ADAPTER)
]
Targets = Annotated[str, typer.Option(help="Linear layers such as q_proj,v_proj (all).", rich_help_panel=ADAPTER)]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Type of the base model.", rich_help_panel=ADAPTER),
]
LearningRate = Annotated[float, typer.Option("--learning-rate", "--lr", rich_help_panel=COURSE)]
WeightDecay = Annotated[float, typer.Option(rich_help_panel=COURSE)]
MaxGradNorm = Annotated[float, typer.Option(help="0: gradients are not clipped.", rich_help_panel=COURSE)]
Seed = Annotated[int, typer.Option(rich_help_panel=COURSE)]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the unfinished run of --adapter-out.", rich_help_panel=COURSE)
]
ReportTo = Annotated[
    str, typer.Option(help="Trackers: tensorboard, wandb, trackio; with commas.", rich_help_panel=REPORT)
]
JsonOut = Annotated[
    Path | None, typer.Option(callback=outputs.checked, help="Write all figures here.", rich_help_panel=REPORT)
]
