"""A model folder that brings code along: none of it runs, whatever its files say and wherever the server is started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from mlx_tandem import demo
from mlx_tandem.config import ModelConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model.loader import load_unread
from tests.serving import ROOT

SMALL = ("--num-blocks", "64", "--max-model-len", "256")
MODULES = (
    "modeling_evil",  # what `auto_map` names
    "configuration_evil",
    "tokenization_evil",
    "evil",
    "qwen3",  # the name of the model's family
    "sitecustomize",  # what Python imports by itself
    "json",  # what the server imports, if it looks into the folder
    "numpy",
    "mlx_lm",
    "safetensors",
    "mlx_tandem",
    "__init__",
    "conftest",
)


class Folder:
    """A working model folder full of code that leaves a file behind when it runs."""

    def __init__(self, path: Path):
        self.path = path
        self._canary = path.parent / "canary"
        shutil.copytree(demo.MODEL_PATH, path)
        code = f"open({str(self._canary)!r}, 'a').write(__name__)\nclass Model: pass\nclass ModelArgs: pass\n"
        for module in MODULES:
            (path / f"{module}.py").write_text(code)
        (path / "mlx_tandem").mkdir()
        for module in ("__init__", "worker", "__main__"):
            (path / "mlx_tandem" / f"{module}.py").write_text(code)
        pickled = f"cbuiltins\nexec\n(S{code!r}\ntR.".encode()  # what pickle.loads would run
        for name in ("pytorch_model.bin", "training_args.bin", "model.pt", "adapters.npz"):
            (path / name).write_bytes(pickled)

    def change(self, file: str, **changes: object) -> None:
        old = json.loads((self.path / file).read_text())
        (self.path / file).write_text(json.dumps(old | changes))

    @property
    def has_run(self) -> str:
        return self._canary.read_text() if self._canary.exists() else ""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "model")
    auto = {name: f"modeling_evil.{name}" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    made.change("config.json", auto_map=auto, custom_pipelines={"x": {"impl": "evil.Model"}}, trust_remote_code=True)
    tokenizer = {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", "tokenization_evil.EvilTokenizer"]}
    made.change("tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=tokenizer, trust_remote_code=True)
    return made


def start(folder: Folder) -> subprocess.Popen[str]:
    """A server that is started within the model's folder, as people do."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "mlx_tandem", "serve", ".", "--port", "0", *SMALL],
        cwd=folder.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )


def test_the_code_would_run(folder: Folder) -> None:
    """Whoever looks into the folder for modules runs it, so the next test can see it."""
    subprocess.run([sys.executable, "-c", "import modeling_evil"], cwd=folder.path, check=True)
    assert "modeling_evil" in folder.has_run


@pytest.mark.promise("A2")
def test_code_beside_the_model_is_not_run(folder: Folder) -> None:
    """The model is served: its weights are what they were."""
    with start(folder) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if line.startswith("Ready: "):
                    body = {"messages": [{"role": "user", "content": "What is 12 + 5?"}], "temperature": 0}
                    reply = httpx.post(f"{line.split()[1]}/v1/chat/completions", json=body, timeout=60)
                    break
            else:
                pytest.fail(server.stderr.read() if server.stderr else "")
        finally:
            server.terminate()
            server.communicate(timeout=60)
    assert reply.json()["choices"][0]["message"]["content"] == "12 + 5 = 17."
    assert server.returncode == 0
    assert not folder.has_run


@pytest.mark.promise("A2")
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_file": "evil.py"}, "model_file"),
        ({"model_file": None}, "model_file"),
        ({"model_type": "../../evil"}, "model_type"),
        ({"model_type": "evil"}, "model_type"),
        ({"model_type": "cache"}, "model_type"),
        ({"model_type": "base.x"}, "model_type"),
    ],
)
def test_a_model_that_needs_its_code_is_refused_by_that_field(
    folder: Folder, changes: dict[str, object], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where its modules could be imported by their names."""
    folder.change("config.json", **changes)
    monkeypatch.syspath_prepend(folder.path)
    monkeypatch.chdir(folder.path)
    with pytest.raises(ModelError) as raised:
        load_unread(ModelConfig(path="."), lambda stage, fraction: None)
    assert raised.value.message.startswith("config.json: ") and field in raised.value.message
    assert not folder.has_run


def test_a_server_does_not_start_with_a_model_that_needs_its_code(folder: Folder) -> None:
    folder.change("config.json", model_file="evil.py")
    with start(folder) as server:
        _, errors = server.communicate(timeout=60)
    assert server.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith("tandem: config.json: ") and "model_file" in last
    assert not folder.has_run


@pytest.mark.promise("A1")
def test_an_adapter_that_is_code_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "adapter")
    (folder.path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (folder.path / "adapter_model.bin").write_bytes((folder.path / "model.pt").read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "mlx_tandem", "serve", *SMALL, "--port", "0", "--adapter", "mine", str(folder.path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "tandem: adapter mine: adapter_model.bin: is a format that is not read; convert it to safetensors"
    )
    assert not folder.has_run
