"""`tandem models` as a user runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mlx_tandem import demo
from tests import tiny_models
from tests.unit.cli_tools import tandem


def models(*arguments: str) -> subprocess.CompletedProcess[str]:
    return tandem("models", *arguments)


def test_it_says_what_a_hybrid_caches_and_lacks(tmp_path: Path) -> None:
    done = models(str(tiny_models.make(tmp_path / "model", "qwen3_next")))
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].split()[:2] == ["model", "qwen3_next,"]
    assert "as far as can be told without its weights" in said[1]
    assert "cache                attention to all positions in 1 layer: 256 bytes a token" in said
    assert "cache                a state in 1 layer: 3,200 bytes a sequence" in said
    assert "not supported" not in done.stdout
    assert any(line.startswith("states ") and "states of 3,200 bytes each" in line for line in said)


def test_it_says_whether_images_are_served(tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "model", "llama", vision_config={"model_type": "seen_by_nobody"})
    done = models(str(folder))
    assert done.returncode == 0, done.stderr
    assert "images               not served: images of model_type 'llama' are not served here" in done.stdout


def test_the_check_refuses_what_a_start_refuses(tmp_path: Path) -> None:
    folder = tiny_models.make(tmp_path / "model", "gpt_bigcode")
    done = models(str(folder), "--check")
    assert done.returncode == 1 and not done.stdout
    assert "'gpt_bigcode' is not supported yet" in done.stderr


@pytest.mark.parametrize(
    "words",
    ["models {}", "serve {} --port 0", "serve {} --dry-run", "train sft lessons.jsonl --model {}", "bench engine {}"],
)
def test_an_adapter_is_no_model_and_is_called_one(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": text}) for text in ("one", "two", "three")]
    Path("lessons.jsonl").write_text("\n".join(lines))
    folder = str(demo.ADAPTER_PATHS["shout"])
    done = tandem(*words.format(folder).split())
    assert done.returncode == 1 and not done.stdout
    assert f"tandem: {folder} is an adapter, not a model: it is served beside its base model" in done.stderr
    assert "Traceback" not in done.stderr
