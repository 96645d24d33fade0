"""The command line without a server: options, settings, start-up cost, small parts."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from mlx_tandem import demo, limits
from mlx_tandem.cli.app import app, join_pairs, split_pairs
from mlx_tandem.cli.bench.serve import figures, ratios
from mlx_tandem.cli.bench.stats import median, spread
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.cli.bench.timeline import Timeline
from mlx_tandem.cli.http import Events
from mlx_tandem.cli.settings import OPTIONS, SettingsError, build
from mlx_tandem.config import Config

HEAVY = (
    "mlx",
    "mlx_lm",
    "numpy",
    "fastapi",
    "uvicorn",
    "transformers",
    "tokenizers",
    "jinja2",
    "safetensors",
    "asyncio",
)


def tandem(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mlx_tandem", *args], capture_output=True, text=True, check=False)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['tandem', '--help']\n"
        "from mlx_tandem.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print('IMPORTED', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "serve" in done.stdout
    assert done.stdout.strip().endswith("IMPORTED []")


@pytest.mark.parametrize("command", [(), ("serve",), ("demo",), ("bench",), ("bench", "serve"), ("bench", "engine")])
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    done = tandem(*command, "--help")
    assert done.returncode == 0
    assert "Usage: tandem" in done.stdout


def test_version() -> None:
    assert tandem("--version").stdout.startswith("mlx-tandem 0.")


def leaves(struct: type, place: str = "") -> set[str]:
    found = set()
    for field in msgspec.structs.fields(struct):
        inner = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        found |= leaves(field.type, f"{place}{field.name}.") if inner else {f"{place}{field.name}"}
    return found


def test_every_setting_is_an_option_and_every_option_a_setting() -> None:
    assert set(OPTIONS.values()) == leaves(Config)
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert {p.name for p in serve.params} == set(OPTIONS) | {"model_option", "config"}


def test_every_numeric_setting_has_a_range() -> None:
    config = msgspec.convert({"engine": {"model": {"path": "x"}}}, Config)

    def value(place: str) -> Any:
        found: Any = config
        for part in place.split("."):
            found = getattr(found, part)
        return found

    numeric = {p for p in leaves(Config) if isinstance(value(p), (int, float)) and not isinstance(value(p), bool)}
    assert set(limits.SETTINGS) == numeric


def test_pairs() -> None:
    assert join_pairs(["m", "--adapter", "a", "x/y", "--port", "1", "--adapter", "b=z"]) == [
        *["m", "--adapter", "a=x/y", "--port", "1", "--adapter", "b=z"]
    ]
    assert join_pairs(["--adapter"]) == ["--adapter"]
    assert split_pairs(["a=x=y"]) == [("a", "x=y")]
    with pytest.raises(typer.BadParameter):
        split_pairs(["a"])


def test_without_a_model_the_built_in_one_is_served() -> None:
    config = build(None, {})
    assert config.engine.model.path == str(demo.MODEL_PATH)
    assert config.adapters == tuple((name, str(path)) for name, path in demo.ADAPTER_PATHS.items())
    assert build(None, {"adapter": [("x", "y")]}).adapters == (("x", "y"),)
    assert build(None, {"model": "m"}).adapters == ()


def test_options_weigh_more_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engine: {model: {path: m}, cache: {block_size: 32}}\nserver: {port: 1}\nadapters: {a: x, b: y}\n")
    config = build(file, {"port": 2, "served_model_name": ["n"]})
    assert (config.server.port, config.engine.cache.block_size) == (2, 32)
    assert config.server.served_model_names == ("n",)
    assert config.adapters == (("a", "x"), ("b", "y"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server: {prot: 1}", "unknown setting 'server.prot'; did you mean 'port'?"),
        ("max_num_seqs: 3", "unknown setting 'max_num_seqs'; did you mean 'engine.scheduler.max_num_seqs'?"),
        ("engine: {model: {path: m}, lora: {max_lora: 3}}", "did you mean 'max_loras'?"),
        ("zzzzqq: 1", "known are: engine, server, adapters"),
        ("server: {port: 70000}", "'server.port' is 70000: it must lie between 0 and 65535"),
        ("engine: {model: {path: m}, cache: {memory_fraction: .nan}}", "memory_fraction"),
        ("server: {port: x}", "server.port"),
        ("server: 3", "'server' must hold settings by name"),
        ("- 1", "must hold settings by name"),
        ("a: [", "is not YAML"),
        ("adapters: {../x: y}", "adapter name"),
        ("engine: {model: {path: m, dtype: float8}}", "dtype"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    done = tandem("serve", "--config", str(file))
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_that_is_not_there() -> None:
    done = tandem("serve", "--config", "nowhere.yaml")
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "tandem: nowhere.yaml cannot be read: No such file or directory",
    )


def test_twice_the_same_name() -> None:
    with pytest.raises(SettingsError, match="'a' is named twice"):
        build(None, {"adapter": [("a", "x"), ("a", "y")]})


def test_a_port_in_use_is_said_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = tandem("serve", "--port", str(port))
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        == f"tandem: port {port} on 127.0.0.1 is in use; choose another with --port (0: any free one)"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nowhere",), "there is no model folder nowhere"),
        (("--adapter", "a", "nowhere"), "there is no folder nowhere for the adapter 'a'"),
        (("--port", "0", "--host", "256.0.0.1"), "256.0.0.1:0 cannot be bound"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(args: tuple[str, ...], said: str) -> None:
    done = tandem("serve", *args)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "args",
    [
        ("serve", "a", "-m", "b"),
        ("serve", "--adapter", "x"),
        ("serve", "--prot", "1"),
        ("bench", "serve", "--mode", "base,other"),
        ("bench", "serve", "--concurrency", "1,x"),
        ("bench", "engine"),
        ("bench", "engine", "m", "--shape", "4m"),
    ],
)
def test_wrong_usage_is_status_2(args: tuple[str, ...]) -> None:
    done = tandem(*args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# --- what the benchmarks count ---------------------------------------------------------------------------------------


def event(text: str | None = None, **more: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None}]
    return b"data: " + json.dumps({"id": "x", "choices": choices} | more).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


def test_a_stream_is_counted_whatever_the_pieces() -> None:
    text = 'a "data: {" b\n\nc'
    body = b": keepalive 1/2\n\n" + event("") + event(text) + event("b") + event("c") + event("", usage=None)
    body += event(usage=USAGE) + b"data: [DONE]\n\n"
    for size in (1, 7, 64, len(body)):
        stream = Stream()
        for i in range(0, len(body), size):
            stream(body[i : i + size])
        stream.finish(200)
        assert stream.error is None
        if size < 64:
            assert stream.events == 3
        assert (stream.tokens, stream.prompt_tokens) == (3, 7)
        assert len(stream.gaps()) == stream.events - 1


def test_a_stream_of_one_event_per_piece() -> None:
    stream = Stream()
    for piece in (event(""), event("a"), event("b"), event("c", usage=USAGE), b"data: [DONE]\n\n"):
        stream(piece)
    stream.finish(200)
    assert (stream.events, stream.silent, stream.tokens) == (3, 1, 3)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"error": {"message": "no"}}', 503, "503"),
        (event("a") + b'data: {"error": {"message": "engine died"}}\n\n', 200, "engine died"),
        (event("a"), 200, "without [DONE]"),
    ],
)
def test_a_broken_stream_is_an_error(body: bytes, status: int, said: str) -> None:
    stream = Stream()
    stream(body)
    stream.finish(status)
    assert stream.error is not None
    assert said in stream.error
    broken = figures([stream])
    assert (broken["errors"], broken["tokens"]) == (1, 0)


def test_events_are_cut() -> None:
    seen: list[str] = []
    events = Events(seen.append)
    for piece in (b"data: a\n", b"\n: comment\n\nda", b"ta: b\n\n"):
        events(piece)
    assert seen == ["a", "b"]


def test_spread_and_median() -> None:
    assert spread([]) == {"mean": 0.0, "p50": 0.0, "p95": 0.0, "p99": 0.0}
    assert spread(list(range(101))) == {"mean": 50.0, "p50": 50, "p95": 95, "p99": 99}
    assert median([{"a": 1, "b": {"c": 2.0}, "d": None}, {"a": 3, "b": {"c": 4.0}, "d": "x"}]) == {
        "a": 2.0,
        "b": {"c": 3.0},
    }


def test_ratios_compare_rounds_with_their_neighbours() -> None:
    def rounds(*values: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": v} for v in values]

    found = ratios({(4, "base"): rounds(100, 200), (4, "same"): rounds(90, 180), (4, "mixed"): rounds(45, 180)})
    assert found == [{"concurrency": 4, "mixed/same": 0.75, "same/base": 0.9, "mixed/base": 0.675}]


def test_a_timeline_counts_while_all_rows_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("mlx_tandem.cli.bench.timeline.perf_counter", lambda: float(next(clock)))
    # Row 1 starts late: decoding of both is counted from its first token to the end of row 0.
    timeline = Timeline.of(2, [[0], [0, 1], [0, 1], [0, 1], [1]])
    found = timeline.figures(prompt_tokens=10, max_tokens=4)
    assert found == {"decode_tokens_per_s": 2.0, "prefill_tokens_per_s": 5.0, "total_tokens_per_s": 8 / 5}
    with pytest.raises(RuntimeError, match="3 tokens instead of 4"):
        Timeline.of(1, [[0]] * 3).figures(1, 4)


def test_options_in_help_name_their_aliases() -> None:
    plain = re.sub(r"\s+", " ", tandem("serve", "--help").stdout)
    assert "--ctx-size" in plain
    assert "--max-batch-size" in plain
