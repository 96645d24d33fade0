"""`tandem config`: the file that it writes starts the same server, and explains every setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mlx_tandem import demo
from mlx_tandem.cli.settings import build
from mlx_tandem.cli.settings_file import HEADER, _comments, _sections, lines
from tests.unit.cli_tools import tandem

SHOUT, JSON = (str(demo.ADAPTER_PATHS[name]) for name in ("shout", "json"))
COMMANDS = [
    "",
    "--port 9001 --kv-bits 8 --prefill-share 0.5 --seed 3",
    f"{demo.MODEL_PATH}",
    f"{demo.MODEL_PATH} --adapter a {SHOUT} --adapter b {JSON} --alias c=a:9,base:1 --ab-test c=base",
    "--enable-rl-training --lora-rank 4 --training-share 0.4 --lora-target-modules q_proj,v_proj --learning-rate 1e-8",
    "--served-model-name é --chat-template ./a:b#c --host ::1 --allowed-origins *",
    "--mode training --enable-tinker --tinker-rank 8",
]


def configured(where: Path, words: str) -> Path:
    """The file that the command writes for these options."""
    out = where / "tandem.yaml"
    done = tandem("config", "init", "--out", str(out), *words.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {out}; try: tandem serve --config {out}\n"
    return out


def shown(words: str) -> str:
    done = tandem("config", "show", *words.split())
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("words", COMMANDS)
def test_the_written_file_starts_the_same_server(words: str, tmp_path: Path) -> None:
    out = configured(tmp_path, words)
    assert shown(f"--config {out}") == shown(words)
    assert build(out, {}) == build(_file(tmp_path, shown(words)), {}), "what is shown can be given as well"


def _file(folder: Path, text: str) -> Path:
    (folder / "shown.yaml").write_text(text, encoding="utf-8")
    return folder / "shown.yaml"


def test_without_options_nothing_is_set_and_every_default_is_there(tmp_path: Path) -> None:
    text = configured(tmp_path, "").read_text(encoding="utf-8")
    assert text.startswith(HEADER)
    assert yaml.safe_load(text) is None
    usual = yaml.safe_load(re.sub(r"^#(?=\w|  \w)", "", text, flags=re.MULTILINE))
    assert build(_file(tmp_path, yaml.safe_dump(usual, sort_keys=False)), {}) == build(None, {})
    assert usual == yaml.safe_load("\n".join(lines(build(None, {}), None)))


def test_every_section_and_option_is_explained() -> None:
    text = "\n".join(lines(build(None, {}), None))
    for flag in ("--port: 0: any free port", "--ssd: null: on if `dir` is set", "the variance of their rewards"):
        assert flag in text
    fields = {(kind.__name__, field) for kind, names in _sections().values() if kind for field in names}
    assert fields <= _comments().keys()
    assert len([field for field in fields if _comments()[field]]) > 0.8 * len(fields)


def test_nothing_is_overwritten_and_no_key_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_API_KEY", "a-key-of-some-length")
    assert tandem("config", "init").returncode == 0
    text = Path("tandem.yaml").read_text(encoding="utf-8")
    assert "a-key-of-some-length" not in text
    again = tandem("config", "init", "--port", "9")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == "tandem: tandem.yaml cannot be used: File exists (--out)\n"
    assert Path("tandem.yaml").read_text(encoding="utf-8") == text
    assert "a-key-of-some-length" not in shown("")
    assert 'api_key: "…"' in shown("--api-key another-key-of-some-length")
    refused = tandem("config", "init", "--out", "b.yaml", "--api-key", "x")
    assert refused.returncode == 2 and "--api-key-file" in refused.stderr and not Path("b.yaml").exists()
    assert tandem("config", "show", "--port", "99999").stderr.startswith("tandem: 'server.port' is 99999")
