"""The first hour of a new user who gets something wrong at each step.

Each command ends in one clear line that names the option or the value, with a status other than 0, without a traceback,
and before a model is loaded. A wrong word of the command line itself is shown below its usage, with status 2.
"""

from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem import demo
from mlx_tandem.config import Config
from mlx_tandem.training.online.prompts import read
from tests.fake_hub import fake_hub
from tests.terminal import on_terminal
from tests.unit.cli_tools import tandem, tandem_process

STEPS = [
    # What is there?
    ("sevre", 2, "did you mean 'tandem serve'?"),
    ("chat nowhere -p x", 1, "there is no folder 'nowhere', and no server at http://127.0.0.1:8000 that could have"),
    ("chat --url http://127.0.0.1:9 -p x", 1, "no server answers at 127.0.0.1:9: Connection refused (--url)"),
    ("chat", 1, "nothing is asked: give a question with --prompt"),
    ("logs --port 1", 1, "no server that was started with --daemon is on port 1"),
    ("download org/model", 2, "did you mean 'tandem pull'"),
    ("list", 2, "'tandem models' lists the models of this machine"),
    ("models --check", 2, "--check: goes with one model only"),
    ("models nowhere", 1, "there is no model folder nowhere"),
    ("models empty", 1, "empty/config.json is missing"),
    ("models my-adapter", 1, "my-adapter is an adapter, not a model"),
    ("doctor --only ears", 2, "--only: 'ears' is not one of python, system"),
    ("doctor --only ,", 2, "--only: '' is not one of python, system"),
    # A first server.
    ("serve nowhere --port 0", 1, "there is no model folder nowhere"),
    ("serve my-adapter --dry-run", 1, "my-adapter is an adapter, not a model"),
    ("serve --prot 0", 2, "No such option: --prot"),
    ("serve --port 99999", 1, "is 99999: it must lie between 0 and 65535 (--port)"),
    ("serve --port eighty", 2, "Invalid value for '--port'"),
    ("serve --host 0.0.0.0", 1, "set an API key"),
    ("serve --api-key-file nowhere --port 0", 1, "nowhere cannot be read: No such file or directory (--api-key-file)"),
    ("serve --ssl-certfile nowhere --port 0", 1, "nowhere cannot be read: No such file or directory (--ssl-certfile)"),
    ("serve --config nowhere.yaml", 1, "nowhere.yaml cannot be read"),
    ("serve --config words.txt", 1, "words.txt must hold settings by name"),
    ("serve --kv-bits 5", 2, "Invalid value for '--kv-bits'"),
    ("serve --max-num-seqs -1", 1, "(--max-num-seqs)"),
    ("serve --daemon --api-key secret", 2, "use --api-key-file or TANDEM_API_KEY"),
    ("stop --port 1", 1, "no server that was started with --daemon is on port 1"),
    # An adapter of one's own.
    ("serve --adapter mine --port 0", 2, "a path must follow the name mine"),
    ("serve --adapter mine nowhere --port 0", 1, "there is no 'mine' adapter folder nowhere"),
    ("serve --adapter mine empty --port 0", 1, "adapter mine: the folder empty has no adapter_config.json (--adapter)"),
    ("serve --adapter base my-adapter --port 0", 1, "adapter base: 'base' is the name of the base model"),
    ("serve --adapter 'my own' my-adapter --port 0", 1, "adapter name 'my own' must be"),
    ("serve --adapter-root nowhere", 1, "there is no folder nowhere for --adapter-root"),
    ("serve --default-adapter nobody --port 0", 1, "there is no adapter 'nobody' (--default-adapter); there are"),
    ("serve --alias a=nobody:1 --port 0", 1, "there is no adapter 'nobody' (--alias a)"),
    ("adapters list", 2, "did you mean 'tandem adapters ls'?"),
    ("adapters ls --url http://127.0.0.1:9", 1, "no server answers at 127.0.0.1:9: Connection refused (--url)"),
    ("adapters ls --url nonsense://x", 1, "is not an http:// or https:// address (--url)"),
    ("adapters ls --url https://127.0.0.1:9 --cacert nowhere", 1, "nowhere cannot be read"),
    ("adapters inspect my-model", 1, "my-model cannot be served: adapter_config.json: is missing"),
    ("adapters convert my-adapter my-model --to peft", 1, "my-model: exists and is not an empty folder"),
    # It learns.
    ("serve --enable-rl-training --checkpoint-dir words.txt", 1, "name another one with --checkpoint-dir"),
    ("serve --enable-rl-training --scoring-function nobody", 1, "'nobody'; known are: contains"),
    ("serve --mode training", 1, "add --enable-rl-training"),
    ("train rl --learning-rate fast", 2, "Invalid value for '--learning-rate': 'fast' is not a number or 'auto'"),
    ("train rl --environment no.toml", 1, "'no.toml', but there is no such file (--environment)"),
    ("train rl --environment sort", 1, "with --environment-python (--environment)"),
    ("train rl --atropos-url nowhere", 1, "the address of run-api (--atropos-url)"),
    ("learn list", 1, "there is no folder checkpoints; name another one with --checkpoint-dir"),
    ("learn show --checkpoint-dir empty", 1, "no server has learned with this folder"),
    ("learn export --checkpoint-dir empty", 1, "no server has learned with this folder"),
    # It works together with others.
    ("serve --federate 3", 1, "needs 'cluster.share' (--share-model): only a leader averages what trainers learn"),
    ("train rl --connect-to node1:8000 --federate 3", 1, "what trainers learn (--federate)"),
    ("serve --connect-to node1", 1, "'cluster.connect_to' is 'node1'; it must be HOST:PORT, or a URL like"),
    ("serve --connect-to node1:8000 --share-model", 1, "a leader follows nobody (--share-model, --connect-to)"),
    ("serve --connect-to node1:8000 --wait-for-leader 0", 1, "must lie between 1 and 86400 (--wait-for-leader)"),
    ("serve --connect-to 127.0.0.1:9 --cluster-dir closed", 1, "cannot be used: Not a directory (--cluster-dir)"),
    ("serve --enable-tinker --tinker-dir closed", 1, "closed cannot be used: Not a directory (--tinker-dir)"),
    ("learn watch --url http://127.0.0.1:9", 1, "no server answers at 127.0.0.1:9: Connection refused (--url)"),
    ("checkpoints ls --checkpoint-dir nowhere", 1, "name another one with --checkpoint-dir"),
    ("checkpoints rollback 3", 1, "confirm it with --yes"),
    ("demo learn --plot closed/x.svg", 1, "--plot: closed/x.svg cannot be used"),
    # Training from examples.
    ("train finetune", 2, "did you mean 'tandem train sft'?"),
    ("train sft", 2, "Missing argument 'DATA'"),
    ("train sft nowhere.jsonl", 1, "nowhere.jsonl cannot be read: No such file or directory"),
    ("train sft words.txt", 1, "words.txt, line 1: not valid JSON"),
    ("train sft closed", 1, "closed holds no example"),
    ("train sft empty", 1, "empty cannot be read: Is a directory"),
    ("train sft lessons.jsonl --schedule linear", 1, "needs a number of epochs"),
    ("train sft lessons.jsonl --batch-size 64", 1, "there are 4 examples to learn (--batch-size)"),
    ("train sft lessons.jsonl --adapter-out 'my skill'", 1, "the name 'my skill' of the folder of --adapter-out"),
    ("train sft lessons.jsonl --model nowhere", 1, "there is no model folder nowhere (--model)"),
    ("train sft lessons.jsonl --init-from empty", 1, "empty cannot be used: adapter_config.json: is missing"),
    ("train sft lessons.jsonl --json-out closed/x.json", 1, "--json-out: closed/x.json cannot be used"),
    ("train sft lessons.jsonl --plot x.gif", 2, "ends neither in .png nor in .svg"),
    # How fast is it?
    ("bench serve --url http://127.0.0.1:9", 1, "no server answers at 127.0.0.1:9: Connection refused (--url)"),
    ("bench serve --mode all", 2, "--mode: 'all' is not one of base, same"),
    ("bench serve --json-out closed/x.json", 1, "--json-out: closed/x.json cannot be used"),
    ("bench engine", 2, "give either a model's folder or --shape"),
    ("bench engine --shape 8b", 1, "there is no shape '8b'"),
    ("bench engine nowhere", 1, "nowhere is not a folder"),
]  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the user works, with what is mistaken for something else."""
    (tmp_path / "my-model").symlink_to(demo.MODEL_PATH)
    (tmp_path / "my-adapter").symlink_to(demo.ADAPTER_PATHS["shout"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "closed").touch()
    (tmp_path / "words.txt").write_text("a few words\n")
    lessons = [json.dumps({"prompt": f"Sort down: {n} 3", "completion": f"{n} 3"}) for n in range(4, 9)]
    (tmp_path / "lessons.jsonl").write_text("\n".join(lessons))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(("words", "status", "said"), [pytest.param(*step, id=step[0]) for step in STEPS])
def test_wrong_input_ends_in_one_clear_line(desk: Path, words: str, status: int, said: str) -> None:
    before = {path for path in desk.iterdir() if path.name not in ("run", "cache")}
    done = tandem(*shlex.split(words))
    *above, line = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert said in line
    if status == 1:
        assert line.startswith("tandem: ") and above == []
    else:
        assert line.startswith("Error: ") and [a.split()[0] for a in above if a] in (["Usage:", "Try"], [])
    assert {path for path in desk.iterdir() if path.name not in ("run", "cache")} == before, "something was left"


def test_a_model_that_the_hub_does_not_have(desk: Path) -> None:
    with fake_hub({}) as hub:
        done = tandem_process("serve", "org/no-model", "--port", "0", env=hub.environment(desk))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("tandem: there is no model folder org/no-model, and ")


def test_an_error_after_the_model_was_loaded_names_its_option(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of learning are read then, by the server, of which only this is run here."""

    def started(config: Config, sock: socket.socket, **ignored: object) -> None:
        sock.close()
        nothing: Any = None
        read(Path(config.rl_training.validation_prompts), nothing, nothing, "", 64)

    monkeypatch.setattr("mlx_tandem.server.serve.run", started)
    monkeypatch.setattr("mlx_tandem.cli.hub.close", lambda: None)  # which holds for the rest of the process
    done = tandem("serve", "--port", "0", "--enable-rl-training", "--validation-prompts", "lessons.jsonl")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("unknown field `completion` (--validation-prompts)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sevre", "did you mean 'tandem serve'?"),
        ("serve nowhere", "tandem: there is no model folder nowhere"),
        ("serve --default-adapter nobody", "there is no adapter 'nobody' (--default-adapter)"),
        ("train sft lessons.jsonl --batch-size 64", "(--batch-size)"),
        ("bench serve --url http://127.0.0.1:9", "(--url)"),
    ],
)
def test_on_a_terminal_of_80_by_24(desk: Path, words: str, said: str) -> None:
    """In a process of its own; the whole of what is said is on the screen."""
    with on_terminal(*words.split(), columns=80, rows=24) as terminal:
        lines = terminal.read_to_end()
        assert terminal.process.wait() in (1, 2)
    assert said.replace(" ", "") in "".join(lines).replace(" ", "")
    assert len(lines) <= 7 and "Traceback" not in "".join(lines)
