"""The command line without a server: options, settings, start-up cost, small parts."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import typer

from mlx_tandem import demo, limits
from mlx_tandem.adapters.convert import convert, inspect
from mlx_tandem.cli import keys, main, programs, serve
from mlx_tandem.cli.app import app
from mlx_tandem.cli.bench.figures import figures, ratios
from mlx_tandem.cli.bench.stats import median, spread
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.cli.bench.timeline import Timeline
from mlx_tandem.cli.http import Events
from mlx_tandem.cli.options import OPTIONS, split_arms, split_pairs
from mlx_tandem.cli.settings import SettingsError, build
from mlx_tandem.config import Arm, Config
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server.keys import read_key
from mlx_tandem.training.store.checkpoints import Checkpoints
from mlx_tandem.training.store.manifests import Manifest
from tests.fake_hub import fake_hub

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "mlx",
    "mlx_lm",
    "numpy",
    "starlette",
    "uvicorn",
    "transformers",
    "tokenizers",
    "jinja2",
    "safetensors",
    "huggingface_hub",
    "yaml",
    "asyncio",
)


def tandem(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_tandem", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


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


COMMANDS = (
    "serve|stop|restart|demo|adapters|adapters ls|adapters load|adapters unload|adapters inspect|adapters convert|"
    "checkpoints|checkpoints ls|checkpoints export|checkpoints rollback|cache|cache ls|cache check|cache clear|"
    "train|train rl|train sft|demo learn|doctor"
)


@pytest.mark.parametrize(
    "command", [(), *(tuple(c.split()) for c in f"{COMMANDS}|bench|bench serve|bench engine".split("|"))]
)
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


def test_every_setting_of_serving_is_an_option_and_every_option_a_setting() -> None:
    assert set(OPTIONS.values()) <= leaves(Config)
    in_the_file_only = leaves(Config) - set(OPTIONS.values())
    assert {place.partition(".")[0] for place in in_the_file_only} == {"engine", "rl_training"}
    assert all(place.startswith(("engine.duty.", "rl_training.")) for place in in_the_file_only)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command, own in ((commands["serve"], {"dry_run"}), (commands["train"].commands["rl"], set())):
        assert {p.name for p in command.params} == set(OPTIONS) | {"folder", "config", "daemon"} | own


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
    assert split_pairs(["a=x=y"]) == [("a", "x=y")]
    with pytest.raises(typer.BadParameter):
        split_pairs(["a"])


@pytest.mark.parametrize("word", ["a", "a=", "=b", "a=b:x", "a=b:1,", "a=b:-1", "a=b,b", "a=:1"])
def test_a_wrong_alias(word: str) -> None:
    with pytest.raises(typer.BadParameter):
        split_arms([word])


def test_without_a_model_the_built_in_one_is_served() -> None:
    config = build(None, {})
    assert config.engine.model.path == str(demo.MODEL_PATH)
    assert config.adapters == tuple((name, str(path)) for name, path in demo.ADAPTER_PATHS.items())
    assert build(None, {"adapter": [("x", "y")]}).adapters == (("x", "y"),)
    assert build(None, {"model": "m"}).adapters == ()


def test_options_weigh_more_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {path: m}\ncache: {block_size: 32}\nengine: {stall_seconds: 9}\nserver: {port: 1}\n"
        "adapters: {a: x, b: y}\naliases: {c: {a: 9, b@1: 1.5}}\nadapter_root: r\n"
    )
    config = build(file, {"port": 2, "served_model_name": ["n"]})
    assert (config.server.port, config.engine.cache.block_size, config.engine.stall_seconds) == (2, 32, 9)
    assert config.aliases == (("c", (Arm("a", 9), Arm("b@1", 1.5))),)
    assert config.adapter_root == "r"
    assert config.server.served_model_names == ("n",)
    assert config.adapters == (("a", "x"), ("b", "y"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server: {prot: 1}", "unknown setting 'server.prot'; did you mean 'port'?"),
        ("max_num_seqs: 3", "unknown setting 'max_num_seqs'; did you mean 'scheduler.max_num_seqs'?"),
        ("engine: {scheduler: {max_num_seqs: 3}}", "unknown setting 'engine.scheduler'"),
        ("lora: {max_lora: 3}", "did you mean 'max_loras'?"),
        ("server: {block_size: 3}", "did you mean 'cache.block_size'?"),
        (
            "zzzzqq: 1",
            "known are: model, cache, disk, scheduler, lora, duty, engine, server, adapters, adapter_root, aliases, "
            "rl_training, checkpointing",
        ),
        ("server: {port: 70000}", "'server.port' is 70000: it must lie between 0 and 65535"),
        ("cache: {memory_fraction: .nan}", "'cache.memory_fraction' is nan"),
        ("cache: {num_blocks: x}", "cache.num_blocks"),
        ("aliases: {a: b}", "'aliases.a' must hold the weight of each adapter"),
        ("aliases: {a: {b: 0}}", "alias 'a': arms needs a weight above 0"),
        ("aliases: {a: {b: -1}}", "alias 'a': arms[0].weight must be"),
        ("adapters: {a: x}\naliases: {a: {b: 1}}", "'a' is named twice"),
        ("adapters: [a]", "'adapters' must hold one entry for each name"),
        ("model: m", "'model' must hold settings by name"),
        ("model: {base_model_path: a, path: b}", "'model.base_model_path' and 'model.path' are the same setting"),
        ("server: {port: x}", "server.port"),
        ("server: 3", "'server' must hold settings by name"),
        ("- 1", "must hold settings by name"),
        ("a: [", "is not YAML"),
        ("adapters: {../x: y}", "adapter name"),
        ("model: {path: m, dtype: float8}", "dtype"),
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


def test_the_names_of_another_server_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("server: {mode: inference_only, max_batch_size: 0}\nmodel: {base_model_path: m}\n")
    config = build(file, {})
    assert config.engine.model.path == "m"
    assert config.engine.scheduler.max_num_seqs == 1
    assert build(file, {"max_num_seqs": 3}).engine.scheduler.max_num_seqs == 3


def test_twice_the_same_name() -> None:
    with pytest.raises(SettingsError, match="'a' is named twice"):
        build(None, {"adapter": [("a", "x"), ("a", "y")]})


def test_a_port_in_use_is_said_before_anything_is_fetched_or_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with fake_hub({}) as hub:
            for more in ([], ["org/big-model"], ["org/big-model", "--daemon"]):
                done = tandem("serve", *more, "--port", str(port), env=hub.environment(tmp_path))
                said = f"tandem: port {port} on 127.0.0.1 is in use; choose another with --port (0: any free one)\n"
                assert (done.returncode, done.stderr) == (1, said)
        assert not hub.asked


def test_settings_need_no_web_framework() -> None:
    code = (
        "import sys\nfrom mlx_tandem.cli.serve import prepare\n"
        "config, sock = prepare(None, {'port': 0, 'api_key': 'k'})\nsock.close()\n"
        "print([m for m in ('starlette', 'uvicorn', 'mlx', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nowhere", "--port", "0"), "there is no model folder nowhere"),
        (("--adapter", "a", "nowhere", "--port", "0"), "there is no 'a' adapter folder nowhere"),
        (("--port", "0", "--host", "256.0.0.1", "--api-key", "k"), "256.0.0.1:0 cannot be bound"),
        (("--host", "0.0.0.0"), "0.0.0.0 can be reached from other machines: set an API key"),
        (("--host", "0.0.0.0", "--api-key", ""), "0.0.0.0 can be reached from other machines: set an API key"),
        (("--adapter-root", "nowhere"), "there is no folder nowhere for --adapter-root"),
        (("--api-key-file", "nowhere"), "the key file nowhere cannot be read: No such file or directory"),
        (("--api-key", "a b"), "the API key must be at most 4096 printable ASCII characters without spaces"),
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
        ("serve", "--trust-remote-code"),
        ("serve", "--daemon", "--api-key", "k"),
        ("adapters", "convert", "x", "y", "--to", "z"),
        ("bench", "serve", "--mode", "base,other"),
        ("bench", "serve", "--concurrency", "1,x"),
        ("bench", "engine"),
        ("bench", "engine", "m", "--shape", "4m"),
        ("bench", "engine", "m", "--adapters", "2"),
        ("bench", "engine", "m", "--bits", "4"),
        ("bench", "engine", "--shape", "4m", "--batch", "8x"),
        ("bench", "engine", "--shape", "4m", "--plot", "a.gif"),
    ],
)
def test_wrong_usage_is_status_2(args: tuple[str, ...]) -> None:
    done = tandem(*args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_pipe_with_the_key_cannot_go_to_the_background(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key")
    done = tandem("serve", "--daemon", "--port", "0", "--api-key-file", str(tmp_path / "key"))
    assert done.returncode == 2
    assert "a pipe cannot go to the background" in done.stderr


# --- the key ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in keys.VARIABLES:  # of whoever runs this
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "key"
    file.write_text("from-file\nsecond line\n")
    file.chmod(0o600)
    return str(file)


def key(**options: str) -> str:
    server = build(None, options).server
    found = keys.read(server.api_key, server.api_key_file)
    assert found == keys.given(options.get("api_key"), options.get("api_key_file"))
    return found


def test_the_key_of_the_flag_weighs_most(key_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert key() == ""
    settings = tmp_path / "c.yaml"
    settings.write_text("server: {api_key: from-settings}")
    assert build(settings, {}).server.api_key == "from-settings"
    monkeypatch.setenv("VLLM_API_KEY", "of-vllm")
    assert key() == build(settings, {}).server.api_key == "of-vllm"
    monkeypatch.setenv("MLX_LM_SERVER_API_KEY_FILE", key_file)
    assert key() == "from-file"
    monkeypatch.setenv("MLX_LM_SERVER_API_KEY", "of-mlx-lm-server")
    assert key() == "of-mlx-lm-server"
    monkeypatch.setenv("TANDEM_API_KEY_FILE", key_file)
    assert key() == "from-file"
    monkeypatch.setenv("TANDEM_API_KEY", "of-tandem")
    assert key() == "of-tandem"
    assert key(api_key_file=key_file) == "from-file"
    assert key(api_key_file=key_file, api_key="of-flag") == "of-flag"
    assert key(api_key_file=key_file, api_key="") == ""
    assert build(settings, {"api_key": ""}).server.api_key == ""
    monkeypatch.setenv("TANDEM_API_KEY", "")
    assert key() == "from-file"


def test_a_key_file_that_others_can_read_is_a_warning(key_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys.given(None, key_file) == "from-file"
    assert capsys.readouterr().err == ""
    Path(key_file).chmod(0o644)
    assert keys.given(None, key_file) == "from-file"
    assert capsys.readouterr().err == f"tandem: warning: the key file {key_file} can be read by others (mode 644)\n"


@pytest.mark.parametrize("content", ["", "\nsecret\n", "a b", "kéy", "k" * 5000])
def test_a_key_file_without_a_key(key_file: str, content: str) -> None:
    Path(key_file).write_text(content, encoding="utf-8")
    with pytest.raises(InvalidRequest) as problem:
        read_key("", key_file)
    assert content.strip() == "" or content.strip() not in str(problem.value)


# --- other programs' names -------------------------------------------------------------------------------------------


class Unbound:
    def close(self) -> None:
        pass


@pytest.fixture
def served_as(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What a program's call comes to: the settings to serve with, and the words for one in the background. Nothing is
    bound, and the folder m is a model."""
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in keys.VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def call(program: Any, *words: str) -> tuple[Config, list[str] | None]:
        seen: list[Any] = []

        def foreground(
            file: Path | None, settings: dict[str, object], defaults: Any, *, called_as: str, verbose: bool
        ) -> None:
            seen.extend((serve.prepare(file, settings, called_as, defaults)[0], None))
            raise SystemExit(0)

        def background(argv: list[str]) -> int:
            seen.extend((None, argv))
            return 0

        monkeypatch.setattr(serve, "serve", foreground)
        monkeypatch.setattr(serve, "_bind", lambda _: Unbound())
        monkeypatch.setattr("mlx_tandem.cli.daemon.start", background)
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with pytest.raises(SystemExit) as end:
            program()
        assert end.value.code == 0
        return seen[0], seen[1]

    return call


@pytest.mark.parametrize("folder", ["plain", "with a space", "a=b"])
@pytest.mark.parametrize("how", ["-m {}", "--model={}", "{}", "--config c.yaml", "-m {} --served-model-name own"])
def test_a_program_s_name_for_every_model_comes_last(served_as: Any, tmp_path: Path, folder: str, how: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / "c.yaml").write_text(f"model: {{path: '{folder}'}}")
    words = [word.format(folder) for word in how.split(" ")]
    own = "own" if "own" in words else folder
    for program, name in ((programs.mlx_server, "model"), (programs.mlx_parallm_serve, "base-model")):
        config, _ = served_as(program, *words)
        assert config.server.served_model_names == (own, name)
        assert config.engine.model.path == folder


def test_an_adapter_keeps_the_name_that_a_program_would_give(served_as: Any, tmp_path: Path) -> None:
    config, _ = served_as(programs.mlx_server, "-m", "m", "--adapter", "model", str(tmp_path))
    assert config.server.served_model_names == ()


def test_the_port_of_a_program_gives_way_to_the_file_s(served_as: Any, tmp_path: Path) -> None:
    for text, port in (("model: {path: m}", 8080), ("server: {port: 8123}", 8123)):
        (tmp_path / "c.yaml").write_text(text)
        assert served_as(programs.mlx_server, "--config", "c.yaml")[0].server.port == port


def test_a_server_in_the_background_knows_what_it_was_called(served_as: Any) -> None:
    _, words = served_as(programs.mlx_server, "-m", "m", "--daemon")
    assert words == ["--called-as", "mlx-server", "serve", "-m", "m"]


def test_the_programs_of_other_servers(served_as: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = served_as(programs.mlx_server, "-m", "m")
    assert (config.engine.model.path, config.server.port, config.server.host) == ("m", 8080, "127.0.0.1")
    assert served_as(programs.mlx_server, "-m", "m", "--port", "8081")[0].server.port == 8081
    assert served_as(programs.mlx_parallm_serve, "--model-path", "m")[0].engine.model.path == "m"
    assert served_as(programs.mola, "-v", "serve", "--model", "m")[0].engine.model.path == "m"
    _, words = served_as(programs.mola, "-v", "start", "--model", "m", "--port", "8001")
    assert words == ["-v", "serve", "--model", "m", "--port", "8001"]
    assert capsys.readouterr().err == ""
    config, _ = served_as(programs.mlx_lm_server, "--model", "m")
    assert (config.engine.model.path, config.server.port, config.server.host) == ("m", 8000, "127.0.0.1")
    assert capsys.readouterr().err.startswith("tandem: warning: this listens on 127.0.0.1")
    served_as(programs.mlx_lm_server, "--model", "m", "--host", "localhost")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("--mode rl -m m", "train rl -m m"),
        ("-m m --mode=rl", "train rl -m m"),
        ("rl -m m --mode training", "train rl -m m --mode training"),
    ],
)
def test_the_program_that_trains(served_as: Any, words: str, command: str) -> None:
    config, _ = served_as(programs.mlx_parallm_train, *words.split())
    assert (config.rl_training.enabled, config.engine.duty.mode) == (True, "training_only")
    assert config.server.served_model_names == ("m", "base-model")
    _, background = served_as(programs.mlx_parallm_train, *words.split(), "--daemon")
    assert background == ["--called-as", "mlx_parallm_serve", *command.split()]


@pytest.mark.parametrize("module", ["mlx_lm_server", "mola.cli"])
def test_the_modules_of_other_servers(module: str) -> None:
    words = [] if module == "mlx_lm_server" else ["serve"]
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "--help"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0
    assert "Usage: tandem serve" in done.stdout


def test_every_script_can_be_called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert set(scripts) == {"tandem", "mola", "mlx-server", "mlx_parallm_serve", "mlx_parallm_train"}
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        with pytest.raises(SystemExit) as end:
            getattr(importlib.import_module(module), function)()
        assert end.value.code == 0, name
        assert "Usage: tandem" in capsys.readouterr().out


# --- adapter folders -------------------------------------------------------------------------------------------------


def test_inspect_and_convert(tmp_path: Path) -> None:
    shout = str(demo.ADAPTER_PATHS["shout"])
    mine = str(tmp_path / "mine")
    assert tandem("adapters", "convert", shout, mine, "--to", "peft").returncode == 0
    seen = {f: tandem("adapters", "inspect", f).stdout.partition("digest")[0] for f in (shout, mine)}
    assert "format    mlx-lm\nrank      16\n" in seen[shout]
    assert "layers    0–5\n" in seen[shout]
    assert seen[mine] == seen[shout].replace("mlx-lm", "peft")
    again = tandem("adapters", "convert", shout, mine, "--to", "peft")
    assert (again.returncode, again.stderr) == (1, "tandem: target: exists and is not an empty folder\n")
    broken = tandem("adapters", "inspect", str(tmp_path))
    assert broken.returncode == 1
    assert broken.stderr.startswith(f"tandem: {tmp_path} cannot be served: adapter_config.json")


# --- checkpoint folders ----------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Two checkpoints of the same adapter, the first of which was worth more."""
    book = Checkpoints(tmp_path / "kept", 10)
    book.lock()
    for step, reward in ((100, 0.75), (200, 0.5)):
        folder = book.new(f"checkpoint-{step}")
        convert(demo.ADAPTER_PATHS["shout"], folder, "peft")
        (folder / "optimizer.safetensors").write_bytes(b"whatever")
        book.commit(
            folder, Manifest(name=f"checkpoint-{step}", step=step, version=step // 50, digest="d" * 64, reward=reward)
        )
    book.close()
    return book.folder


def test_checkpoints_are_listed(kept: Path) -> None:
    done = tandem("checkpoints", "ls", "--checkpoint-dir", str(kept))
    assert (done.returncode, done.stderr) == (0, "")
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if line[:1] == "│"
    ]
    assert [row[:4] for row in rows] == [
        ["checkpoint-200", "200", "4", "0.500"],
        ["checkpoint-100 (best)", "100", "2", "0.750"],
        ["best-performance (best)", "100", "2", "0.750"],
    ]


def test_a_checkpoint_is_exported(kept: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tandem("checkpoints", "export", "checkpoint-100", str(out), "--checkpoint-dir", str(kept))
    assert (done.returncode, done.stdout) == (0, f"wrote {out}\n")
    assert {path.name for path in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert inspect(out).digest == inspect(kept / "checkpoint-100").digest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ls --checkpoint-dir nowhere", "there is no folder nowhere; name another one with --checkpoint-dir"),
        ("export checkpoint-100 out --checkpoint-dir nowhere", "there is no folder nowhere"),
        ("export checkpoint-300 out --checkpoint-dir {kept}", "there is no checkpoint 'checkpoint-300'"),
        ("export ../kept out --checkpoint-dir {kept}", "checkpoint must be 1 to 64 letters"),
        ("export checkpoint-100 {kept} --checkpoint-dir {kept}", "{kept} exists"),
        ("rollback --url http://127.0.0.1:9", "no server answers at 127.0.0.1:9: Connection refused"),
    ],
)
def test_what_cannot_be_done_with_a_checkpoint_is_one_line(kept: Path, words: str, said: str) -> None:
    done = tandem("checkpoints", *words.format(kept=kept).split())
    assert done.returncode == 1
    assert done.stderr.startswith(f"tandem: {said.format(kept=kept)}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", "no server answers at 127.0.0.1:9: Connection refused"),
        ("http://[::1]:9", "no server answers at [::1]:9: "),
        ("http://localhost:x", "'http://localhost:x' is not an http:// address"),
        ("https://localhost", "'https://localhost' is not an http:// address"),
    ],
)
def test_adapters_of_a_server_that_is_not_there(url: str, said: str) -> None:
    done = tandem("adapters", "ls", "--url", url)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tandem: {said}")


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
        (b'{"error": {"message": "no"}}', 500, "500"),
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
    assert timeline.prefill(prompt_tokens=10) == {"prefill_ms": 2000.0, "prefill_tokens_per_s": 5.0}
    assert timeline.decode(max_tokens=4) == {
        "decode_tokens_per_s": 2.0,
        "step_ms": 1000.0,
        "generated_before": 2.0,  # 2 and 1, then 3 and 2
    }
    with pytest.raises(RuntimeError, match="3 tokens instead of 4"):
        Timeline.of(1, [[0]] * 3).decode(4)
    with pytest.raises(RuntimeError, match="1 rows got no token"):
        Timeline.of(2, [[0]] * 3).prefill(4)


def test_options_in_help_name_their_aliases() -> None:
    plain = re.sub(r"\s+", " ", tandem("serve", "--help").stdout)
    assert "--ctx-size" in plain
    assert "--max-batch-size" in plain


def test_an_interrupt_while_modules_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(**given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "mlx_tandem.cli.app", SimpleNamespace(app=app))
    with pytest.raises(SystemExit) as e:
        main(["serve"])
    assert e.value.code == 130
