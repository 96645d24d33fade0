"""The commands and their options; what they do is in the modules beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from mlx_tandem import __version__

app = typer.Typer(
    help="One base model in memory, many LoRA adapters served from it in one batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure a running server, or the engine alone.", no_args_is_help=True)
app.add_typer(bench, name="bench")


class ServeCommand(TyperCommand):
    """Lets `--adapter` take a name and a path as two words: they travel as one, `NAME=PATH`, which is legal too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, join_pairs(args))


def join_pairs(args: list[str]) -> list[str]:
    """`--adapter NAME PATH` → `--adapter NAME=PATH`; a word with `=` in it is a pair already."""
    joined: list[str] = []
    words = iter(args)
    for word in words:
        joined.append(word)
        if word == "--adapter":
            name = next(words, None)
            if name is None:
                break
            path = None if "=" in name or name.startswith("-") else next(words, None)
            joined.append(name if path is None else f"{name}={path}")
    return joined


def split_pairs(values: list[str] | None) -> list[tuple[str, str]]:
    pairs = []
    for value in values or []:
        name, equals, path = value.partition("=")
        if not equals or not name or not path:
            raise typer.BadParameter(f"'{value}' is not a name and a path", param_hint="--adapter")
        pairs.append((name, path))
    return pairs


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlx-tandem {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


_MODEL, _SERVER, _CACHE, _BATCH, _LORA = "Model", "Server", "KV cache", "Batching", "Adapters"


@app.command(cls=ServeCommand)
def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Folder of the base model; the built-in one if absent.")
    ] = None,
    model_option: Annotated[
        str | None,
        typer.Option("--model", "-m", "--model-path", metavar="MODEL", help="The same.", rich_help_panel=_MODEL),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        typer.Option(help="auto: float32 on a CPU, else the model's own.", rich_help_panel=_MODEL),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            "--ctx-size",
            help="Longest prompt and answer, in tokens (also --ctx-size).",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    random_weights: Annotated[
        bool | None,
        typer.Option("--random-weights", help="Read the shapes only, for benchmarks.", rich_help_panel=_MODEL),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME PATH", help="Serve the LoRA adapter in PATH as NAME (repeatable).", rich_help_panel=_LORA
        ),
    ] = None,
    max_loras: Annotated[
        int | None, typer.Option(help="Adapters on the device at once.", rich_help_panel=_LORA)
    ] = None,
    max_lora_rank: Annotated[
        int | None, typer.Option(help="Highest rank that is accepted.", rich_help_panel=_LORA)
    ] = None,
    lora_backend: Annotated[
        Literal["auto", "gather", "windows"] | None,
        typer.Option(help="How the adapters' share is computed.", rich_help_panel=_LORA),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind (127.0.0.1).", rich_help_panel=_SERVER)] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to bind, 0 for a free one (8000).", rich_help_panel=_SERVER)
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="A further name of the base (repeatable).", rich_help_panel=_SERVER)
    ] = None,
    default_max_tokens: Annotated[
        int | None, typer.Option(help="For requests that do not say (512).", rich_help_panel=_SERVER)
    ] = None,
    max_request_bytes: Annotated[
        int | None, typer.Option(help="Largest body that is read.", rich_help_panel=_SERVER)
    ] = None,
    max_queue_size: Annotated[
        int | None, typer.Option(help="Requests that may wait; more get 429.", rich_help_panel=_SERVER)
    ] = None,
    drain_seconds: Annotated[
        float | None, typer.Option(help="What runs may finish within, on SIGTERM (30).", rich_help_panel=_SERVER)
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            "--max-num-seqs",
            "--max-batch-size",
            help="Sequences in a batch (64; also --max-batch-size).",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    max_chunk_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens in one step (1024).", rich_help_panel=_BATCH)
    ] = None,
    prefill_share: Annotated[
        float | None,
        typer.Option(help="Time for prompts per step, in decode steps, while others decode.", rich_help_panel=_BATCH),
    ] = None,
    idle_prefill_ms: Annotated[
        float | None,
        typer.Option(help="Time for prompts per step while nobody decodes.", rich_help_panel=_BATCH),
    ] = None,
    heartbeat_seconds: Annotated[
        float | None, typer.Option(help="Between two signs of life of the engine.", rich_help_panel=_BATCH)
    ] = None,
    stall_seconds: Annotated[
        float | None, typer.Option(help="A silent engine is restarted after this.", rich_help_panel=_BATCH)
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", "--kv-block-size", help="Tokens in a block (16).", rich_help_panel=_CACHE),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks in the pool; from --memory-fraction if absent.", rich_help_panel=_CACHE)
    ] = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(help="Share of the memory left after the weights that blocks may take.", rich_help_panel=_CACHE),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of these settings (docs/command-line.md).")
    ] = None,
) -> None:
    """Serve a model and its adapters over HTTP."""
    if model is not None and model_option is not None and model != model_option:
        raise typer.BadParameter("the model is given twice", param_hint="MODEL")
    from mlx_tandem.cli.serve import serve as run

    run(
        config,
        {
            "model": model or model_option,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "random_weights": random_weights,
            "adapter": split_pairs(adapter),
            "max_loras": max_loras,
            "max_lora_rank": max_lora_rank,
            "lora_backend": lora_backend,
            "host": host,
            "port": port,
            "served_model_name": served_model_name,
            "default_max_tokens": default_max_tokens,
            "max_request_bytes": max_request_bytes,
            "max_queue_size": max_queue_size,
            "drain_seconds": drain_seconds,
            "max_num_seqs": max_num_seqs,
            "max_chunk_tokens": max_chunk_tokens,
            "prefill_share": prefill_share,
            "idle_prefill_ms": idle_prefill_ms,
            "heartbeat_seconds": heartbeat_seconds,
            "stall_seconds": stall_seconds,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "memory_fraction": memory_fraction,
        },
    )


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to keep asking.")] = 10.0,
) -> None:
    """Watch the built-in model and its adapters answer the same questions in one batch, then stop."""
    from mlx_tandem.cli.demo import demo as run

    run(seconds)


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise typer.BadParameter(f"'{text}' is not a list of whole numbers such as 1,16,64", param_hint=option)
    return numbers


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(dict.fromkeys(text.split(",")))
    if unknown := set(modes) - {"base", "same", "mixed"}:
        raise typer.BadParameter(f"'{min(unknown)}' is not one of base, same, mixed", param_hint="--mode")
    return modes


@bench.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="The server to measure.")] = "http://127.0.0.1:8000",
    mode: Annotated[
        str, typer.Option(help="Any of base (no adapter), same (one), mixed (all in turn), with commas.")
    ] = "base",
    concurrency: Annotated[
        str, typer.Option(help="Requests under way at once; a list is measured in turn.")
    ] = "1,8,32",
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests per round (4 × concurrency, at least 8).")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Send for this long per round instead.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each mode; the median is reported.")] = 3,
    adapters: Annotated[str | None, typer.Option(help="Names, with commas (all that the server has).")] = None,
    model: Annotated[str | None, typer.Option(help="Send this as the base's name (none is sent).")] = None,
    endpoint: Annotated[Literal["completions", "chat"], typer.Option(help="Which of the two to ask.")] = "completions",
    json_out: Annotated[Path | None, typer.Option(help="Write everything measured here.")] = None,
) -> None:
    """Measure a running server: throughput, first token, inter-token times, and what adapters cost."""
    from mlx_tandem.cli.bench.serve import Load, run

    run(
        Load(
            url=url,
            modes=_modes(mode),
            concurrency=tuple(_numbers(concurrency, "--concurrency")),
            num_requests=num_requests,
            seconds=seconds,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            repeats=repeats,
            adapters=tuple(adapters.split(",")) if adapters else None,
            model=model,
            endpoint=endpoint,
        ),
        json_out,
    )


@bench.command("engine")
def bench_engine(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Folder of a model.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="A model of this shape, made on the spot: 0.13m, 4m, qwen3-8b.")
    ] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Read the shapes of MODEL only.")] = False,
    batch: Annotated[str, typer.Option(help="Sequences at once; a list is measured in turn.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating rounds; the median is reported.")] = 3,
    json_out: Annotated[Path | None, typer.Option(help="Write everything measured here.")] = None,
) -> None:
    """Measure the engine without HTTP, beside mlx-lm's BatchGenerator on the same weights and prompts."""
    if (model is None) == (shape is None):
        raise typer.BadParameter("give either a model's folder or --shape", param_hint="MODEL")
    from mlx_tandem.cli.bench.engine import run

    run(
        model=model,
        shape=shape,
        random_weights=random_weights,
        batches=_numbers(batch, "--batch"),
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        repeats=repeats,
        json_out=json_out,
    )
