"""The command line without a server: options, settings, start-up cost."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from mlx_tandem import demo, limits
from mlx_tandem.cli import main
from mlx_tandem.cli.app import app
from mlx_tandem.cli.help import ELSEWHERE
from mlx_tandem.cli.option_values import split_arms, split_pairs
from mlx_tandem.cli.options import OPTIONS
from mlx_tandem.cli.serve import adapters_line, with_own_adapters
from mlx_tandem.cli.settings import SettingsError, build
from mlx_tandem.config import Arm, Config
from mlx_tandem.files import FolderLock
from tests.fake_hub import fake_hub
from tests.unit.cli_tools import tandem, tandem_process

ROOT = Path(__file__).resolve().parents[3]
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


def test_the_built_in_model_is_served_with_the_adapters_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config = build(None, {})
    root = with_own_adapters(config).adapter_root
    assert root == str(tmp_path / "mlx-tandem" / "adapters") and Path(root).is_dir()
    given = msgspec.structs.replace(config, adapter_root=str(tmp_path))
    assert with_own_adapters(given) == given
    other = build(None, {"model": str(tmp_path)})
    assert with_own_adapters(other) == other
    monkeypatch.setenv("XDG_DATA_HOME", "/dev/null")
    assert with_own_adapters(config) == config, "a folder that cannot be made"


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


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group of commands with the words that call it."""
    command = typer.main.get_command(app) if command is None else command
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize(("path", "command"), [pytest.param(*found, id=" ".join(found[0])) for found in commands()])
def test_help_fits_into_80_columns_and_shows_every_name_whole(path: tuple[str, ...], command: Any) -> None:
    done = tandem(*path, "-h", env={"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(("Usage: tandem", *path)))
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "bool" not in done.stdout
    words = re.findall(r"--[\w-]+", done.stdout)
    assert not [word for word in words if word.endswith("-")], "a line ends within a name"
    for param in command.params:
        if param.param_type_name == "option" and not param.hidden:
            (own,) = [line for line in lines if param.opts[0] in re.split("[ ,]+", line[:40]) and line[2:3] == "-"]
            assert {*param.opts, *param.secondary_opts} <= set(re.split("[ ,]+", own))


def test_help_explains_every_command_in_whole_sentences() -> None:
    for path, command in commands():
        listed = re.sub(r"\s+", " ", tandem(*path, "--help").stdout)
        assert command.help
        for name, inner in getattr(command, "commands", {}).items():
            first = re.split(r"\.(?:\s|$)", inner.help)[0]
            assert f" {name} {' '.join(first.split())}" in listed


def test_version() -> None:
    assert tandem_process("--version").stdout.startswith("mlx-tandem 0.")


@pytest.mark.parametrize("words", ["models ./{}", "adapters inspect ./{}"])
def test_a_terminal_without_utf8_gets_what_it_can_show(words: str, tmp_path: Path) -> None:
    """The name of the folder has characters that its encoding does not have."""
    kind = demo.MODEL_PATH if words.startswith("models") else demo.ADAPTER_PATHS["shout"]
    (tmp_path / "modèles").mkdir()
    (tmp_path / "modèles" / "é").symlink_to(kind)
    name = "modèles" if words.startswith("models") else "modèles/é"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "mlx_tandem", *words.format(name).split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def leaves(struct: type, place: str = "") -> set[str]:
    found = set()
    for field in msgspec.structs.fields(struct):
        inner = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        found |= leaves(field.type, f"{place}{field.name}.") if inner else {f"{place}{field.name}"}
    return found


def test_every_setting_of_serving_is_an_option_and_every_option_a_setting() -> None:
    assert set(OPTIONS.values()) <= leaves(Config)
    in_the_file_only = leaves(Config) - set(OPTIONS.values())
    groups = ("batches.", "cluster.", "engine.duty.", "feedback.", "rl_training.")
    assert {place.partition(".")[0] + "." for place in in_the_file_only} == {*groups, "engine."} - {"engine.duty."}
    assert all(place.startswith(groups) for place in in_the_file_only)
    known = dict(commands())
    for command, own in ((known["serve",], {"dry_run"}), (known["train", "rl"], set())):
        assert {p.name for p in command.params} == set(OPTIONS) | {"folder", "config", "daemon"} | own


def test_every_numeric_setting_has_a_range() -> None:
    config = msgspec.convert({"engine": {"model": {"path": "x"}}}, Config)

    def is_numeric(place: str) -> bool:
        found: Any = config
        for part in place.split("."):
            kinds = typing.get_type_hints(type(found))[part]
            found = getattr(found, part)
        if found is None or isinstance(found, str):  # "auto" in place of a number
            return not {int, float}.isdisjoint(typing.get_args(kinds))
        return isinstance(found, (int, float)) and not isinstance(found, bool)

    assert set(limits.SETTINGS) == {place for place in leaves(Config) if is_numeric(place)}


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
            "known are: model, cache, disk, scheduler, speculation, lora, duty, parallel, engine, server, adapters, "
            "adapter_root, aliases, ab_tests, rl_training, tinker, cluster, feedback, batches, checkpointing",
        ),
        ("server: {port: 70000}", "'server.port' is 70000: it must lie between 0 and 65535"),
        ("cache: {memory_fraction: .nan}", "'cache.memory_fraction' is nan"),
        ("cache: {num_blocks: x}", "cache.num_blocks"),
        ("aliases: {a: b}", "'aliases.a' must hold the weight of each adapter"),
        ("aliases: {a: {b: 0}}", "alias 'a': arms needs a weight above 0"),
        ("aliases: {a: {b: -1}}", "alias 'a': arms[0].weight must be"),
        ("aliases: {a: {b: x}}", "aliases.a[0].weight must be"),
        ("ab_tests: {a: {control: b}}", "A/B test 'a': there is no alias of this name"),
        ("aliases: {a: {b: 1, c: 1}}\nab_tests: {a: {control: d}}", "A/B test 'a': ab_test.control is 'd'"),
        ("aliases: {a: {b: 1, c: 1}}\nab_tests: {a: {control: b, least: 1}}", "ab_tests.a.least is not"),
        ("aliases: {a: {b: 1, c: 1}}\nab_tests: {a: b}", "ab_tests.a must be"),
        ("aliases: {a: {b: 1, c: 1}}\nab_tests: [a]", "'ab_tests' must hold one entry for each name"),
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
        ('model: {path: "a\\ud800"}', "'model.path' must be UTF-8 text without control characters"),
        ('adapters: {a: "x\\ny"}', "'adapters.a' must be UTF-8 text without control characters"),
        ("[" * 5000, "is nested too deeply"),
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
                done = tandem_process("serve", *more, "--port", str(port), env=hub.environment(tmp_path))
                said = f"tandem: port {port} on 127.0.0.1 is in use; choose another with --port (0: any free one)\n"
                assert (done.returncode, done.stderr) == (1, said)
        assert not hub.asked


@pytest.mark.parametrize(
    ("loaded", "unread", "root", "said"),
    [
        ([], [], "", "none"),
        (["a", "b"], [], "", "a, b"),
        (["a"], [], "r", "a; 0 folders in r"),
        (["a"], ["sql"], "r", "a; 1 folder in r, such as sql"),
        ([], ["math", "sql"], "r", "2 folders in r, such as math"),
        ([f"a{i}" for i in range(14)], [], "", ", ".join(f"a{i}" for i in range(12)) + " and 2 more"),
    ],
)
def test_the_banner_says_which_adapters_there_are(loaded: list[str], unread: list[str], root: str, said: str) -> None:
    assert adapters_line(loaded, unread, root) == said


def test_settings_need_no_web_framework() -> None:
    code = (
        "import sys\nfrom mlx_tandem.cli.serve import prepare\n"
        "config, sock = prepare(None, {'port': 0, 'api_key': 'k'})\nsock.close()\n"
        "print([m for m in ('starlette', 'uvicorn', 'mlx', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_server_without_tinker_imports_nothing_for_its_tensors() -> None:
    code = "import sys\nimport mlx_tandem.server.app\nprint([m for m in ('numpy', 'zstandard') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nowhere", "--port", "0"), "there is no model folder nowhere"),
        (("m\udcff", "--port", "0"), "'model.path' must be UTF-8 text without control characters"),
        (("--dry-run", "m\udcff"), "'model.path' must be UTF-8 text without control characters"),
        (("--adapter", "a", "x\udcff", "--port", "0"), "'adapters.a' must be UTF-8 text without control characters"),
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


def test_an_interrupt_while_modules_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(**given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "mlx_tandem.cli.app", SimpleNamespace(app=app))
    with pytest.raises(SystemExit) as e:
        main(["serve"])
    assert e.value.code == 130


@pytest.mark.parametrize("word", ELSEWHERE)
def test_words_of_other_programs_lead_to_what_exists(word: str) -> None:
    done = CliRunner().invoke(app, [word, "x"])
    assert done.exit_code == 2
    assert f"There is no command '{word}': " in done.output
    for command in re.findall(r"'tandem ([a-z ]+?)(?: [A-Z/]+)?[' ]", ELSEWHERE[word]):
        assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0, command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sevre", "'sevre'; did you mean 'tandem serve'?"),
        ("chatt", "'chatt'; did you mean 'tandem chat'?"),
        ("servers", "'servers'; did you mean 'tandem ps'?"),
        ("run", "'run'; did you mean 'tandem chat'?"),
        ("adapters list", "'list'; did you mean 'tandem adapters ls'?"),
        ("adapters remove", "'remove'; did you mean 'tandem adapters unload'?"),
        ("adapters show", "'show'; did you mean 'tandem adapters inspect'?"),
        ("checkpoints restore", "'restore'; did you mean 'tandem checkpoints rollback'?"),
        ("cache prune", "'prune'; did you mean 'tandem cache clear'?"),
        ("train finetune", "'finetune'; did you mean 'tandem train sft'?"),
        ("learn xyz", "'xyz'; there are list, show, export, watch."),
        ("org/model", "'org/model': 'tandem serve org/model' serves a model."),
        (".", "'.': 'tandem serve .' serves a model."),
        ("quantum", "'quantum'; there are serve, chat, launch, top, status, stop, restart, ps, logs, models,"),
    ],
)
def test_a_word_that_is_no_command_leads_to_the_nearest(words: str, said: str) -> None:
    done = tandem(*words.split(), "more")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Error: There is no command {said}" in " ".join(done.stderr.split())
    if suggested := re.search(r"mean 'tandem ([a-z ]+)'", said):
        assert tandem(*suggested[1].split(), "--help").returncode == 0


def test_a_checkpoint_folder_that_cannot_be_used_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    """The start fails for the folder although there is no such model."""
    busy, file = tmp_path / "busy", tmp_path / "file"
    busy.mkdir()
    file.touch()
    lock = FolderLock(busy)
    try:
        for folder, says in ((busy, f"is in use by process {os.getpid()}"), (file / "below", "cannot be used")):
            options = ("--enable-rl-training", "--checkpoint-dir", str(folder))
            done = tandem("serve", str(tmp_path / "model"), *options, "--port", "0")
            assert done.returncode == 1
            assert says in done.stderr and "--checkpoint-dir" in done.stderr, done.stderr
    finally:
        lock.release()
