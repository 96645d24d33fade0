"""`tandem models`: lists the models of this machine, or says what one is and whether it serves here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from mlx_tandem.cli.adapters import AsJson
from mlx_tandem.cli.console import fail
from mlx_tandem.config import Config, EngineConfig, ModelConfig
from mlx_tandem.printable import printable
from mlx_tandem.types import CacheGroupInfo, ModelSummary

Folder = Annotated[
    str | None,
    typer.Argument(
        metavar="PATH", help="A model folder, its id on the Hugging Face hub, or a folder of models; if absent, all."
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Read the weights and check the answers, as a start does.")]


def models(
    path: Folder = None,
    check: Check = False,
    as_json: AsJson = False,
) -> None:
    """List the models of this machine and what fits, or say of one what it is, whether it serves here, what it caches
    and how its memory would be divided.

    No weight is read without --check. Exit status 1 if the model cannot be served.
    """
    from mlx_tandem.cli import inventory

    if path is None or inventory.has_models(Path(path)):
        if check:
            raise typer.BadParameter("goes with one model only", param_hint="--check")
        inventory.show([] if path is None else [Path(path)], as_json)
        return
    _show(path, check, as_json)


def _show(path: str, check: bool, as_json: bool) -> None:
    """Say what one model is."""
    from msgspec import json, to_builtins

    from mlx_tandem.cli import dry_run, hub
    from mlx_tandem.errors import TandemError
    from mlx_tandem.planning import summary

    try:
        engine, _ = hub.find_models(EngineConfig(model=ModelConfig(path=path)))
        found, memory, longest, device = summary(engine, check=check)
    except hub.HubError as e:
        fail(str(e))
    except TandemError as e:
        fail(e.message)
    if as_json:
        said = {"model": to_builtins(found), "memory": to_builtins(memory), "longest": longest, "device": device}
        print(json.format(json.encode(said), indent=2).decode())
        return
    for line in (*lines(found, longest, checked=check), "", *dry_run.lines(Config(engine), memory, longest, device)):
        print(printable(line))


def lines(found: ModelSummary, longest: int, *, checked: bool) -> Iterator[str]:
    """Yield the lines about a model that can be served, for `longest` tokens at most. `checked`: its answers were."""
    precision = f"{found.quantization}, computed in {found.dtype}" if found.quantization else found.dtype
    yield f"model                {found.model_type}, {found.parameters:,} parameters, {precision}"
    serves = "yes" if checked else "yes, as far as can be told without its weights (--check reads them)"
    yield f"serves here          {serves}; up to {longest:,} tokens in a sequence"
    for group in found.groups:
        yield f"cache                {described(group)}"
    if found.vision is not None:
        yield f"images               {found.vision.outcome}"
    for what in found.unsupported:
        yield f"not supported        {what}"


def described(group: CacheGroupInfo) -> str:
    """Return what the layers of one kind cache, in words."""
    layers = f"{group.layers} layer" + "s" * (group.layers != 1)
    if group.kind == "state":
        return f"a state in {layers}: {group.nbytes:,} bytes a sequence"
    sees = f"a window of {group.window:,} positions" if group.kind == "window" else "all positions"
    return f"attention to {sees} in {layers}: {group.nbytes:,} bytes a token"
