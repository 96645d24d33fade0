"""The commands of `tandem bench` and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from mlx_tandem.cli import outputs
from mlx_tandem.cli.adapters import CaCert
from mlx_tandem.cli.help import Command, group

bench = group("Measure a running server, or the engine alone.")


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise typer.BadParameter(f"'{text}' is not a list of whole numbers such as 1,16,64", param_hint=option)
    return numbers


def _modes(text: str) -> tuple[str, ...]:
    from mlx_tandem.cli.bench.workloads import MODES, with_baselines

    modes = tuple(text.split(","))
    if unknown := set(modes) - MODES.keys():
        raise typer.BadParameter(f"'{min(unknown)}' is not one of {', '.join(MODES)}", param_hint="--mode")
    return with_baselines(modes)


def _batches(text: str, prompt_tokens: int) -> list[tuple[int, int]]:
    """Return the (rows, prompt tokens) of each batch in a list such as 1,64,32x4096."""
    found = []
    for part in text.split(","):
        rows, cross, length = part.partition("x")
        found.append((_numbers(rows, "--batch")[0], _numbers(length, "--batch")[0] if cross else prompt_tokens))
    return found


_LOAD, _ENGINE, _CHECKS, _REPORT = "Load", "Engine", "Checks", "Report"


@bench.command("serve", cls=Command)
def bench_serve(
    url: Annotated[str, typer.Option(help="The server to measure.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="The server's key; --api-key-file or TANDEM_API_KEY do not show in `ps`.")
    ] = None,
    api_key_file: Annotated[str | None, typer.Option(help="File whose first line is the key.")] = None,
    cacert: CaCert = None,
    mode: Annotated[
        str,
        typer.Option(
            help="Any of base (no adapter), same (one), mixed (all in turn), skew (four in five requests to one), "
            "zipf, long-decode-mixed, separated by commas.",
            rich_help_panel=_LOAD,
        ),
    ] = "base",
    concurrency: Annotated[
        str, typer.Option(help="Requests under way at once; a list is measured in turn.", rich_help_panel=_LOAD)
    ] = "1,8,32",
    profile: Annotated[
        Literal["jan"] | None,
        typer.Option(help="A fixed set of requests instead of --mode and --concurrency.", rich_help_panel=_LOAD),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests per round (4 × concurrency, at least 24).", rich_help_panel=_LOAD),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Send for this long per round instead.", rich_help_panel=_LOAD)
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            help="Send this many requests per second, answered or not; --concurrency bounds those under way.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, rich_help_panel=_LOAD)] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.", rich_help_panel=_LOAD)] = 64,
    sampling: Annotated[
        Literal["mixed", "greedy"],
        typer.Option(help="mixed: neighbours differ in temperature and top_p.", rich_help_panel=_LOAD),
    ] = "mixed",
    zipf_exponent: Annotated[
        float,
        typer.Option(
            min=0.0, max=10.0, help="Exponent of zipf; more prefers the first adapters.", rich_help_panel=_LOAD
        ),
    ] = 1.0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds of each mode; the median is reported.", rich_help_panel=_LOAD)
    ] = 3,
    adapters: Annotated[
        str | None, typer.Option(help="Names, separated by commas (all of the server's).", rich_help_panel=_LOAD)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Send this as the base's name (none is sent).", rich_help_panel=_LOAD)
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="The route to measure.", rich_help_panel=_LOAD)
    ] = "completions",
    routed_validation: Annotated[
        bool,
        typer.Option(
            "--routed-validation",
            help="Repeat every request alone; exit with status 1 if an answer differs.",
            rich_help_panel=_CHECKS,
        ),
    ] = False,
    validation_sample: Annotated[
        int | None, typer.Option(min=1, help="Repeat at most so many requests.", rich_help_panel=_CHECKS)
    ] = None,
    json_out: Annotated[
        Path | None,
        typer.Option(callback=outputs.checked, help="Write everything measured here.", rich_help_panel=_REPORT),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=outputs.picture,
            help="Draw it into this .png or .svg file (needs matplotlib).",
            rich_help_panel=_REPORT,
        ),
    ] = None,
) -> None:
    """Measure a running server: throughput, request, first-token and inter-token times, and what adapters cost."""
    from mlx_tandem.cli import keys
    from mlx_tandem.cli.console import fail

    modes, levels = _modes(mode), tuple(_numbers(concurrency, "--concurrency"))
    from mlx_tandem.cli.bench.serve import run
    from mlx_tandem.cli.bench.workloads import Load
    from mlx_tandem.errors import InvalidRequest

    try:
        key = keys.given(api_key, api_key_file)
        keys.warn_if_readable(key, url)
    except InvalidRequest as e:
        fail(str(e))
    run(
        Load(
            url=url,
            modes=modes,
            concurrency=levels,
            num_requests=num_requests,
            seconds=seconds,
            rate=rate,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            repeats=repeats,
            adapters=tuple(adapters.split(",")) if adapters else None,
            zipf_exponent=zipf_exponent,
            model=model,
            endpoint=endpoint,
            profile=profile,
            validate=routed_validation,
            validation_sample=validation_sample,
            api_key=key,
            cacert=cacert,
        ),
        json_out,
        plot,
    )


@bench.command("engine", cls=Command)
def bench_engine(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a model.")] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Measure a model of this shape with random weights: 0.13m, 4m, qwen3-8b, qwen3.5-9b."),
    ] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Draw MODEL's weights at random.")] = False,
    batch: Annotated[
        str,
        typer.Option(
            help="Numbers of sequences, optionally with their prompt tokens, measured in turn: 1,64,32x4096.",
            rich_help_panel=_LOAD,
        ),
    ] = "1,8,32",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt, unless --batch says them.", rich_help_panel=_LOAD)
    ] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.", rich_help_panel=_LOAD)] = 128,
    num_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="After each batch, run a closed loop of so many requests as `bench serve` does: new prompts, with as "
            "many under way as the batch has rows.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    sampling: Annotated[
        Literal["mixed", "greedy"],
        typer.Option(help="mixed: neighbours differ in temperature and top_p.", rich_help_panel=_LOAD),
    ] = "mixed",
    adapters: Annotated[
        int,
        typer.Option(
            min=0,
            max=256,
            help="Random adapters of rank 16 on all linears; each batch runs without any, with one for all rows, and "
            "with all in turn (needs --shape).",
            rich_help_panel=_LOAD,
        ),
    ] = 0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Alternating rounds; the median is reported.", rich_help_panel=_LOAD)
    ] = 3,
    bits: Annotated[
        Literal["4", "8"] | None,
        typer.Option(help="Quantise the weights of the --shape.", rich_help_panel=_ENGINE),
    ] = None,
    max_chunk_tokens: Annotated[int, typer.Option(min=0, help="As for `tandem serve`.", rich_help_panel=_ENGINE)] = 0,
    kv_bits: Annotated[
        Literal["16", "8", "4"], typer.Option(help="As for `tandem serve`.", rich_help_panel=_ENGINE)
    ] = "16",
    num_blocks: Annotated[int, typer.Option(min=0, help="As for `tandem serve`.", rich_help_panel=_ENGINE)] = 0,
    attention_backend: Annotated[
        Literal["auto", "portable", "cuda", "metal"],
        typer.Option(help="As for `tandem serve`.", rich_help_panel=_ENGINE),
    ] = "auto",
    spec: Annotated[
        Literal["none", "ngram", "draft", "mtp"],
        typer.Option(help="Measure the engine with drafts, too, in turn with itself.", rich_help_panel=_ENGINE),
    ] = "none",
    draft_model: Annotated[
        str,
        typer.Option(
            "--draft-model-path", metavar="MODEL", help="Folder of the model for --spec draft.", rich_help_panel=_ENGINE
        ),
    ] = "",
    ngram_max: Annotated[int, typer.Option(min=1, max=64, help="As for `tandem serve`.", rich_help_panel=_ENGINE)] = 8,
    text: Annotated[
        Literal["free", "chat", "repeats", "random"],
        typer.Option(
            help="What drafts find: answers to random tokens or to questions, one repeated token, or random ones.",
            rich_help_panel=_LOAD,
        ),
    ] = "free",
    no_peer: Annotated[
        bool, typer.Option("--no-peer", help="Do not measure BatchGenerator.", rich_help_panel=_ENGINE)
    ] = False,
    json_out: Annotated[
        Path | None,
        typer.Option(
            callback=outputs.checked, help="Write everything measured here, after each round.", rich_help_panel=_REPORT
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=outputs.picture,
            help="Draw it into this .png or .svg file (needs matplotlib).",
            rich_help_panel=_REPORT,
        ),
    ] = None,
) -> None:
    """Measure the engine without HTTP, and compare it with mlx-lm's BatchGenerator and with this device's memory
    bandwidth.

    Both run the same weights and prompts.
    """
    if (model is None) == (shape is None):
        raise typer.BadParameter("give either a model's folder or --shape", param_hint="MODEL")
    if (adapters or bits) and shape is None:
        raise typer.BadParameter("goes with --shape", param_hint="--adapters" if adapters else "--bits")
    batches = _batches(batch, prompt_tokens)
    from mlx_tandem.cli.bench.engine import Batch, EngineLoad, run
    from mlx_tandem.config import CacheConfig

    run(
        EngineLoad(
            tuple(Batch(*b) for b in batches),
            max_tokens=max_tokens,
            num_requests=num_requests,
            repeats=repeats,
            sampling=sampling,
            adapters=adapters,
            bits=int(bits) if bits else None,
            peer=not no_peer,
            spec=spec,
            draft_model=draft_model,
            ngram_max=ngram_max,
            text=text,
        ),
        model=model,
        shape=shape,
        random_weights=random_weights,
        cache=CacheConfig(
            num_blocks=num_blocks, kv_bits=cast("Any", int(kv_bits)), attention_backend=attention_backend
        ),
        max_chunk_tokens=max_chunk_tokens,
        json_out=json_out,
        picture=plot,
    )


@bench.command("report")
def bench_report(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="Folder of a model; the built-in one unless given.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating rounds; the median is reported.")] = 3,
) -> None:
    """Measure the engine briefly and print one Markdown block to paste into an issue."""
    from mlx_tandem import demo
    from mlx_tandem.cli.bench.block import run

    print(run(model or demo.MODEL_PATH, repeats))
