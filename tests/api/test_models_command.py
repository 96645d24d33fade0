"""`tandem models` as a user runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mlx_tandem import demo
from mlx_tandem.cli.inventory import _listed, recommended
from mlx_tandem.config import EngineConfig, ModelConfig
from mlx_tandem.planning import plans
from tests import tiny_models
from tests.unit.cli_tools import on_a_thread, tandem


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


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: one that serves, one that does not, an adapter, and a file."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.make(folder / "good", "qwen3_next")
    tiny_models.make(folder / "bad", "gpt_bigcode")
    (folder / "adapter").symlink_to(demo.ADAPTER_PATHS["shout"])
    (folder / "notes.txt").write_text("")
    return folder


def test_the_models_of_this_machine_are_listed_with_what_fits(models_folder: Path) -> None:
    """Those of a folder, and those that were fetched from the hub (tests/unit/cli/test_pull.py)."""
    done = models(str(models_folder), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    rows = {row["name"]: row for row in told["models"]}
    assert rows[""]["fits"] and rows[""]["bytes"] == (demo.MODEL_PATH / "model.safetensors").stat().st_size
    good, bad = rows[str(models_folder / "good")], rows[str(models_folder / "bad")]
    assert (good["fits"], good["family"], good["tokens"]) == (True, "qwen3_next", 256) and good["sequences"] > 0
    assert not bad["fits"] and "'gpt_bigcode' is not supported yet" in bad["reason"]
    assert not [name for name in rows if name.endswith(("adapter", "notes.txt"))]
    table = tandem("models", str(models_folder), env={"COLUMNS": "80"}).stdout
    assert "(built in)" in table and "none: " in table


def test_a_model_that_does_not_fit_is_listed_with_the_reason() -> None:
    """The limit stands for a small machine."""
    model = ModelConfig(path=str(demo.MODEL_PATH))
    engines = [EngineConfig(model=model, memory_limit_gb=gigabytes) for gigabytes in (0.001, 4.0)]
    small, large = (
        _listed("x", e, plan) for e, plan in zip(engines, on_a_thread(lambda: plans(engines))[2], strict=True)
    )
    assert not small.fits and "the device has 1.0 MB" in small.reason and small.sequences == 0
    assert large.fits and large.sequences > 0


@pytest.mark.parametrize(("gigabytes", "name"), [(0.5, None), (1, "0.6B"), (16, "8B"), (24, "14B"), (512, "32B")])
def test_a_model_is_recommended_by_memory(gigabytes: float, name: str | None) -> None:
    found = recommended(int(gigabytes * 1e9))
    assert (found is None) if name is None else (found is not None and f"-{name}-" in found[0])
    assert found is None or found[1] <= gigabytes * 0.5e9


def test_one_model_as_json() -> None:
    told = json.loads(models(str(demo.MODEL_PATH), "--json").stdout)
    assert told["model"]["model_type"] == "qwen3" and told["longest"] == 8192
    assert told["memory"]["weights"] > 0 and told["device"]


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
