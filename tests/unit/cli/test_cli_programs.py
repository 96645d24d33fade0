"""Other servers' program names: what a call of one of them comes to."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.cli import keys, programs, serve
from mlx_tandem.cli.callers import CALLERS
from mlx_tandem.cli.settings import build
from mlx_tandem.config import Config

ROOT = Path(__file__).resolve().parents[3]


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
    (tmp_path / "adapter_config.json").touch()
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
    assert words == ["-v", "--called-as", "mola", "serve", "--model", "m", "--port", "8001"]
    config, _ = served_as(programs.mlx_lm_server, "--model", "m")
    assert (config.engine.model.path, config.server.port, config.server.host) == ("m", 8000, "127.0.0.1")


DIFFERENT = {
    programs.mlx_lm_server: {
        "it listens on 127.0.0.1 (for other machines: --host 0.0.0.0 and --api-key-file FILE)": "--host localhost",
        "it keeps no prompts on the drive (--ssd does)": "--ssd",
        "its KV cache takes what memory is left (--num-blocks sets another size)": "--num-blocks 64",
    },
    programs.mlx_server: {
        "requests share batches (--max-batch-size 0: one at a time)": "--max-batch-size 0",
        "common beginnings of prompts are kept (--no-enable-prefix-caching)": "--no-enable-prefix-caching",
    },
}
"""What differs from the programs' own defaults, and what has to be given so that nothing is said about it."""


@pytest.mark.parametrize("program", DIFFERENT, ids=["mlx_lm_server", "mlx-server"])
def test_one_line_says_which_defaults_differ(
    served_as: Any, program: Any, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    name, differences = request.node.callspec.id, DIFFERENT[program]
    served_as(program, "-m", "m")
    assert capsys.readouterr().err == f"tandem: {name}'s defaults apply, except that {'; '.join(differences)}\n"
    for said, given in differences.items():
        served_as(program, "-m", "m", *given.split())
        rest = "; ".join(d for d in differences if d != said)
        assert capsys.readouterr().err == f"tandem: {name}'s defaults apply, except that {rest}\n"
    served_as(program, "-m", "m", *" ".join(differences.values()).split())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("program", "called_as", "words"),
    [
        (programs.mola, "mola", ["serve"]),
        (programs.mlx_lm_server, "mlx_lm_server", []),
        (programs.mlx_server, "mlx-server", []),
    ],
)
def test_a_program_s_defaults_give_way_to_the_file_and_to_options(
    served_as: Any, tmp_path: Path, program: Any, called_as: str, words: list[str]
) -> None:
    defaults = {place: v for place, v in CALLERS[called_as].defaults.items() if place != "engine.model.path"}
    config, _ = served_as(program, *words, "-m", "m")
    assert defaults and {place: value(config, place) for place in defaults} == defaults
    (tmp_path / "c.yaml").write_text("{model: {path: m, max_model_len: 99}, scheduler: {max_num_seqs: 3}}")
    config, _ = served_as(program, *words, "--config", "c.yaml", "--default-max-tokens", "7")
    assert (config.engine.model.max_model_len, config.engine.scheduler.max_num_seqs) == (99, 3)
    assert config.server.default_max_tokens == 7


def value(config: Config, place: str) -> object:
    found: object = config
    for part in place.split("."):
        found = getattr(found, part)
    return found


def test_mlx_lm_server_has_a_model_of_its_own() -> None:
    defaults = CALLERS["mlx_lm_server"].defaults
    assert build(None, {}, defaults).engine.model.path == "mlx-community/Qwen3-4B-4bit"
    assert build(None, {"model": "m"}, defaults).engine.model.path == "m"


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        (programs.mlx_server, ["--help"], "(8000). As mlx-server: 8080."),
        (programs.mlx_server, ["--help"], "(30). As mlx-server: 4."),
        (programs.mlx_lm_server, ["--help"], "(64). As mlx_lm_server: 8."),
        (programs.mola, ["start", "--help"], "(64). As mola: 128."),
        (programs.mola, ["--help"], "start Serve in the background."),
    ],
)
def test_a_program_s_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: Any, words: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit):
        program()
    assert said in " ".join(capsys.readouterr().out.split())


def test_jan_names_a_file_of_the_model_and_what_requests_call_it(served_as: Any, tmp_path: Path) -> None:
    (tmp_path / "m" / "model.safetensors").write_bytes(b"")
    config, _ = served_as(programs.mlx_server, "--model", str(tmp_path / "m/model.safetensors"), "--model-id", "a/b")
    assert config.engine.model.path == str(tmp_path / "m")
    assert config.server.served_model_names == ("a/b", "model")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("--mode rl -m m", "train rl -m m"),
        ("-m m --mode=rl", "train rl -m m"),
        ("-m m --mode grpo", "train rl --algorithm grpo -m m"),
        ("rl -m m --mode training", "train rl -m m --mode training"),
    ],
)
def test_the_program_that_trains(served_as: Any, words: str, command: str) -> None:
    config, _ = served_as(programs.mlx_parallm_train, *words.split())
    assert (config.rl_training.enabled, config.engine.duty.mode) == (True, "training_only")
    assert config.server.served_model_names == ("m", "base-model")
    _, background = served_as(programs.mlx_parallm_train, *words.split(), "--daemon")
    assert background == ["--called-as", "mlx_parallm_serve", *command.split()]


@pytest.mark.parametrize("mode", ["ppx", "", "inference"])
def test_a_mode_that_cannot_be_trained_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["mlx_parallm_train", "-m", "m", "--mode", mode])
    with pytest.raises(SystemExit) as end:
        programs.mlx_parallm_train()
    assert end.value.code == 1
    assert f"tandem: --mode {mode} is none of rl, sft, or of rl's algorithms grpo, " in capsys.readouterr().err


@pytest.mark.parametrize("module", ["mlx_lm_server", "mola.cli"])
def test_the_modules_of_other_servers(module: str) -> None:
    words = [] if module == "mlx_lm_server" else ["serve"]
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "--help"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0
    assert f"Usage: {'mola' if words else 'tandem'} serve" in done.stdout


def test_every_script_can_be_called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert set(scripts) == {"tandem", "mola", "mlx-server", "mlx_parallm_serve", "mlx_parallm_train"}
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        with pytest.raises(SystemExit) as end:
            getattr(importlib.import_module(module), function)()
        assert end.value.code == 0, name
        assert f"Usage: {'mola' if name == 'mola' else 'tandem'}" in capsys.readouterr().out
