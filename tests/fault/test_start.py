"""Starting where the system gives little, and with model folders that are wrong: it works, or one line says why not."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_tandem import demo
from tests.privileges import drop_privileges
from tests.serving import ROOT
from tests.tiny_models import make

SMALL = ("--num-blocks", "64", "--max-model-len", "256", "--max-num-seqs", "4")


def serve(
    *words: str, env: Mapping[str, str] | None = None, before: Callable[[], None] = drop_privileges
) -> subprocess.CompletedProcess[str]:
    """Run `tandem serve` until it is ready or has ended; one that was ready is ended by a signal. `before` runs in the
    process before the program does."""
    with subprocess.Popen(
        [sys.executable, "-m", "mlx_tandem", "serve", *words, "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        preexec_fn=before,
    ) as server:
        assert server.stdout is not None
        said = ""
        for line in server.stdout:
            said += line
            if "-d '" in line:  # the end of what it says when it is ready
                server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
        return subprocess.CompletedProcess(server.args, server.returncode, said, errors)


def test_few_files_may_be_open() -> None:
    """A library that wants a higher limit than the system allows is kept from ending the start for it."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
        drop_privileges()

    done = serve(*SMALL, before=limit)
    assert (done.returncode, "Ready: " in done.stdout) == (0, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"), [(256, 1024, [1024, 1024]), (256, 8192, [4096, 8192]), (6000, 8192, [6000, 8192])]
)
def test_the_limit_of_open_files_is_raised_and_never_lowered(soft: int, hard: int, wanted: list[int]) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most not in (resource.RLIM_INFINITY, -1) and most < hard:
        pytest.skip(f"{most} files are the most here")
    program = (
        "import json, resource; from mlx_tandem.model import device; import mlx_lm.utils; "
        "print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        drop_privileges()

    done = subprocess.run(
        [sys.executable, "-c", program], preexec_fn=limit, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert json.loads(done.stdout) == wanted


Break = Callable[[Path], None]


def settings(**changes: object) -> Break:
    """Change config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def contents(name: str, data: bytes) -> Break:
    """Put these bytes in the place of a file."""
    return lambda folder: (folder / name).write_bytes(data) and None


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def not_numbers(folder: Path) -> None:
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    mx.save_safetensors(file, {name: p * float("nan") for name, p in weights.items()}, {"format": "mlx"})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (settings(model_type="\ud800"), r"config.json: model_type '\ud800' is no model's name"),
        (settings(model_type="qwen99"), "config.json: model_type 'qwen99' is not supported"),
        (contents("config.json", b'{"a":' * 100_000), "config.json is not JSON: it is nested too deeply"),
        (contents("config.json", b"[]"), "config.json does not hold a JSON object"),
        (settings(vocab_size=2**40), "config.json: vocab_size must be an integer from 1 to 16,777,216"),
        (settings(num_hidden_layers=10**8), "config.json: num_hidden_layers must be an integer from 1 to 1,024"),
        (settings(num_hidden_layers=1e8), "config.json: num_hidden_layers must be an integer from 1 to 1,024"),
        (settings(hidden_size="64"), "config.json: hidden_size must be an integer from 1 to"),
        (settings(text_config=[]), "config.json: text_config must be an object"),
        (settings(text_config={"vocab_size": 0}), "config.json: text_config.vocab_size must be an integer"),
        (settings(quantization={"bits": 1e9}), "config.json: quantization.bits must be an integer from 1 to 32"),
        (settings(rope_scaling={"type": "no such"}), "config.json: no model can be made of it (ValueError: "),
        (settings(num_hidden_layers=1), "its weights do not fit config.json (ValueError: Received 11 parameters"),
        (settings(eos_token_id=True), None),  # means nothing, and harms nobody
        (cut, "model.safetensors is not a valid safetensors file"),
        (pipe, "model.safetensors is not a regular file"),
        (not_numbers, "the weight model.embed_tokens.weight holds NaN or infinity"),
        (contents("model.safetensors.index.json", b'{"weight_map": {"a": []}}'), "index.json: weight_map must name"),
    ],
    ids=range(18),
)
def test_a_wrong_model_folder_is_one_line_and_status_1(tmp_path: Path, how: Break, says: str | None) -> None:
    folder = make(tmp_path / "model", "qwen3", vocab_size=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(demo.MODEL_PATH / name)
    how(folder)
    done = serve(str(folder), *SMALL)
    assert "Traceback" not in done.stderr
    if says is None:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"tandem: {folder}") and says in last
    assert not done.stdout


def test_a_model_folder_whose_path_is_not_utf_8(tmp_path: Path) -> None:
    done = serve(f"{tmp_path}/m\udcff", *SMALL)
    assert done.returncode == 1
    assert done.stderr == "tandem: 'model.path' must be UTF-8 text without control characters\n"
