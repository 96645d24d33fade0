"""`tandem models`: says what a model folder is, whether it serves here, what it caches, and what is not supported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from mlx_tandem.cli.console import fail
from mlx_tandem.config import Config, EngineConfig, ModelConfig
from mlx_tandem.printable import printable
from mlx_tandem.types import CacheGroupInfo, ModelSummary

Folder = Annotated[str, typer.Argument(metavar="PATH", help="A model folder, or its id on the Hugging Face hub.")]
Check = Annotated[bool, typer.Option("--check", help="Read the weights and check the answers, as a start does.")]


def models(path: Folder, check: Check = False) -> None:
    """Say what a model folder is, whether it serves here, what it caches and how its memory would be divided.

    No weight is read without --check. Exit status 1 if it cannot be served.
    """
    from mlx_tandem.cli import dry_run, hub
    from mlx_tandem.engine_main import summary
    from mlx_tandem.errors import TandemError

    try:
        engine, _ = hub.find_models(EngineConfig(model=ModelConfig(path=path)))
        found, memory, longest, device = summary(engine, check=check)
    except hub.HubError as e:
        fail(str(e))
    except TandemError as e:
        fail(e.message)
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
