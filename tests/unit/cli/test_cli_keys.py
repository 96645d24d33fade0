"""Where the command line has the API key from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_tandem.cli import keys
from mlx_tandem.cli.settings import build
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.server.keys import read_key


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


def test_no_variable_is_left_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in keys.VARIABLES:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("ANOTHER", "x")
    keys.forget_environment()
    assert keys.variable() is None
    assert not set(keys.VARIABLES) & set(os.environ)
    assert os.environ["ANOTHER"] == "x"
