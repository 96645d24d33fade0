"""Starting where the system gives little, and with model folders that are wrong: it works, or one line says why not."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from mlx_tandem import Engine, demo
from mlx_tandem.errors import TandemError
from mlx_tandem.model import backend
from mlx_tandem.model.compiler import HEADER
from tests.privileges import drop_privileges
from tests.serving import ROOT
from tests.tiny_models import make

pytestmark = pytest.mark.restarts

SMALL = ("--num-blocks", "64", "--max-model-len", "256", "--max-num-seqs", "4")


def ask(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
    assert reply.status_code == 200, reply.text


def serve(
    *options: str,
    env: Mapping[str, str] | None = None,
    before: Callable[[], None] = drop_privileges,
    once_ready: Callable[[httpx.Client], None] = ask,
) -> subprocess.CompletedProcess[str]:
    """Run `tandem serve` until it is ready, `once_ready` has returned and a signal has ended it, or until it ends by
    itself. `before` runs in the process before the program does."""
    with subprocess.Popen(
        [sys.executable, "-m", "mlx_tandem", "serve", *options, "--port", "0"],
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
                try:
                    with httpx.Client(base_url=said.split()[1], timeout=60) as client:
                        once_ready(client)
                finally:
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


def without(name: str) -> Break:
    """Remove a file."""
    return lambda folder: (folder / name).unlink()


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


WRONG: list[tuple[Break, str]] = [
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
    (cut, "model.safetensors is not a valid safetensors file"),
    (pipe, "model.safetensors is not a regular file"),
    (not_numbers, "the weight model.embed_tokens.weight holds NaN or infinity"),
    (contents("model.safetensors.index.json", b'{"weight_map": {"a": []}}'), "index.json: weight_map must name"),
    (without("config.json"), "config.json is missing"),
    (without("tokenizer.json"), "tokenizer.json"),
    (without("model.safetensors"), "model.safetensors is missing"),
    (contents("config.json", b"{}"), "model_type is missing"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that is right."""
    folder = make(tmp_path / "model", "qwen3", vocab_size=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(demo.MODEL_PATH / name)
    return folder


@pytest.mark.parametrize(("how", "says"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_model_folder_is_refused_in_one_line(folder: Path, how: Break, says: str) -> None:
    how(folder)
    with pytest.raises(TandemError) as refused:
        Engine(folder, num_blocks=64, max_model_len=256, max_num_seqs=4)
    assert refused.value.message.startswith(str(folder)) and says in refused.value.message
    assert refused.value.message.isprintable()


@pytest.mark.parametrize(("how", "says"), [WRONG[0], (not_numbers, "holds NaN or infinity")], ids=["front", "engine"])
def test_a_wrong_model_folder_ends_the_command_with_one_line_and_status_1(folder: Path, how: Break, says: str) -> None:
    """Whether the server finds it, or the engine in its own process."""
    how(folder)
    done = serve(str(folder), *SMALL)
    assert "Traceback" not in done.stderr
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"tandem: {folder}") and says in last
    assert not done.stdout


def test_a_setting_of_a_model_that_means_nothing_harms_nobody(folder: Path) -> None:
    settings(eos_token_id=True)(folder)
    with Engine(folder, num_blocks=64, max_model_len=256, max_num_seqs=4) as engine:
        assert engine.generate("a", max_tokens=2, ignore_eos=True).token_ids


def test_a_model_folder_whose_path_is_not_utf_8(tmp_path: Path) -> None:
    done = serve(f"{tmp_path}/m\udcff", *SMALL)
    assert done.returncode == 1
    assert done.stderr == "tandem: 'model.path' must be UTF-8 text without control characters\n"


# --- a C++ compiler, and no folder for what it makes ------------------------------------------------------------------


@pytest.fixture
def compiler() -> None:
    if not backend.current().arithmetic.compiled_by_the_host or shutil.which("g++") is None:
        pytest.skip("nothing is compiled for a CPU here")


def full(folder: Path) -> list[str]:
    """Return what has to stand before a command for `folder` to be on a drive of its own that is full."""
    fill = f"mount -t tmpfs -o size=64k none {folder} && (head -c 1000000 /dev/zero > {folder}/x 2> /dev/null || true)"
    within = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{fill}; exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    return within


def lend_header(folder: Path) -> None:
    """Put the compiled header of the system's temporary folder, if there is one, where MLX will compile in `folder`:
    to compile it anew takes long."""
    temporary = Path(tempfile.gettempdir())
    for header in temporary.glob(f"mlx/*/cpu/{HEADER}.gch"):
        there = folder / header.relative_to(temporary)
        there.parent.mkdir(parents=True)
        there.hardlink_to(header)


COMPILES = """
import logging
import mlx_tandem.model
import mlx.core as mx
from mlx_tandem.model import compiler
logging.basicConfig(format="%(message)s")
compiler.prepare()
print(mx.compile(lambda x: mx.sin(x) * 2.0 + 1.0)(mx.zeros(4)).tolist())
"""


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("temporary", ["usable", "missing", "read-only", "full", "another's"])
@pytest.mark.parametrize("cache", ["usable", "not usable"])
def test_a_temporary_folder_that_is_no_use(tmp_path: Path, temporary: str, cache: str) -> None:
    """Another folder is used, or nothing is compiled, and one line says which; what is computed is right."""
    folder, home = tmp_path / "temporary", tmp_path / "home"
    home.mkdir()
    words: list[str] = []
    if temporary != "missing":
        folder.mkdir()
    if temporary == "read-only":
        folder.chmod(0o500)
    if temporary == "full":
        words = full(folder)
    if temporary == "another's":
        (folder / "mlx").mkdir(mode=0o700)
        (folder / "mlx").chmod(0o777)
    made = home / ".cache/mlx-tandem/compiled"
    if cache == "not usable":
        (home / ".cache").write_text("a file")
    else:
        lend_header(made)
    if temporary == "usable":
        lend_header(folder)
    done = subprocess.run(
        [*words, sys.executable, "-c", COMPILES],
        env={**os.environ, "TMPDIR": str(folder), "HOME": str(home), "XDG_CACHE_HOME": ""},
        preexec_fn=drop_privileges,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout == "[1.0, 1.0, 1.0, 1.0]\n"
    if temporary == "usable":
        assert not done.stderr and not list(made.glob("mlx/*/cpu/*.so"))
        assert list(folder.glob("mlx/*/cpu/*.so"))
        return
    (said,) = done.stderr.splitlines()
    assert str(folder) in said
    if cache == "usable":
        assert said.startswith(f"fused operations are compiled in {made} (")
        assert len(list(made.glob("mlx/*/cpu/*.so"))) == 2, "the trial's and the one that is asked for"
    else:
        assert said.startswith("fused operations are not compiled, which makes steps slower: ")


@pytest.mark.usefixtures("compiler")
def test_what_is_compiled_finds_its_header_compiled(tmp_path: Path) -> None:
    """By what g++ says of each header when MLX calls it: a compiled one that it uses stands behind a "!"."""
    tools, folder = tmp_path / "tools", tmp_path / "temporary"
    tools.mkdir()
    folder.mkdir()
    (tools / "g++").write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -H "$@" 2>> {tmp_path}/said\n')
    (tools / "g++").chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", COMPILES],
            env={**os.environ, "TMPDIR": str(folder), "PATH": path},
            check=True,
            cwd=ROOT,
        )
    (header,) = folder.glob(f"mlx/*/cpu/{HEADER}.gch")
    assert (tmp_path / "said").read_text().count(f"! {header}\n") == len(list(folder.glob("mlx/*/cpu/*.so"))) == 2
    assert {file.name for file in header.parent.iterdir()} == {header.name}, "nothing is left over"


@pytest.mark.usefixtures("compiler")
def test_a_server_without_any_folder_for_what_is_compiled(tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("a file")
    done = serve(*SMALL, env={"TMPDIR": "/nowhere", "HOME": str(tmp_path), "XDG_CACHE_HOME": ""})
    assert (done.returncode, "Ready: " in done.stdout) == (0, True), done.stderr
    assert "fused operations are not compiled" in done.stderr
    assert "Traceback" not in done.stderr and "step failed" not in done.stderr


@pytest.mark.usefixtures("compiler")
def test_the_folder_for_what_is_compiled_goes_while_a_server_runs(tmp_path: Path) -> None:
    """Requests that need a kernel which nobody has needed yet are answered all the same."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    if (known := Path(tempfile.gettempdir()) / "mlx").is_dir():
        shutil.copytree(known, folder / "mlx")  # to compile everything anew takes long
    (tmp_path / ".cache").write_text("a file")

    def lose(client: httpx.Client) -> None:
        shutil.rmtree(folder)
        folder.write_text("a file")
        for more in (
            {"temperature": 0.0},
            {"frequency_penalty": 1.0, "presence_penalty": 0.5, "logprobs": 2},
            {"min_p": 0.1, "repetition_penalty": 1.3, "logit_bias": {"5": 3}},
            {"prompt": "b " * 300, "n": 3},
        ):
            body = {"prompt": "a", "max_tokens": 4, "seed": 1, **more}
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
        state = client.get("/health").json()
        assert (state["status"], state["engine_restarts"]) == ("ok", 0)

    env = {"TMPDIR": str(folder), "HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    done = serve("--num-blocks", "64", "--max-num-seqs", "4", env=env, once_ready=lose)
    assert done.returncode == 0
    assert "a step failed and is computed again" in done.stderr, "nothing was compiled: the test sees nothing"
    assert done.stderr.count("fused operations are not compiled, which makes steps slower") == 1
    assert "Traceback" not in done.stderr
