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
