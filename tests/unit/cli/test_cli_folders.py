"""Adapter folders and checkpoints at the command line, and a server that is not there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

import msgspec
import pytest

from mlx_tandem import demo
from mlx_tandem.adapters.convert import convert, inspect
from mlx_tandem.cli import main
from mlx_tandem.training.external import External
from mlx_tandem.training.online.counters import Counters
from mlx_tandem.training.online.serving import UpdateReport
from mlx_tandem.training.store.checkpoints import Checkpoints
from mlx_tandem.training.store.database import Database
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.records import Ended
from mlx_tandem.training.store.rows import Rows
from mlx_tandem.training.trajectories import Trajectory
from tests.commands import ROOT
from tests.terminal import on_terminal
from tests.unit.cli_tools import on_a_thread, tandem


def test_inspect_and_convert(tmp_path: Path) -> None:
    shout = str(demo.ADAPTER_PATHS["shout"])
    mine = str(tmp_path / "mine")
    assert tandem("adapters", "convert", shout, mine, "--to", "peft").returncode == 0
    seen = {f: tandem("adapters", "inspect", f).stdout.partition("digest")[0] for f in (shout, mine)}
    assert "format    mlx-lm\nrank      16\n" in seen[shout]
    assert "layers    0–5\n" in seen[shout]
    assert seen[mine] == seen[shout].replace("mlx-lm", "peft")
    again = tandem("adapters", "convert", shout, mine, "--to", "peft")
    said = f"tandem: {mine}: exists and is not an empty folder: choose another OUT\n"
    assert (again.returncode, again.stderr) == (1, said)
    broken = tandem("adapters", "inspect", str(tmp_path))
    assert broken.returncode == 1
    assert broken.stderr.startswith(f"tandem: {tmp_path} cannot be served: adapter_config.json")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Two checkpoints of the same adapter, the first of which was worth more."""
    book = Checkpoints(tmp_path / "kept", 10)
    book.lock()
    for step, reward in ((100, 0.75), (200, 0.5)):
        folder = book.new(f"checkpoint-{step}")
        convert(demo.ADAPTER_PATHS["shout"], folder, "peft")
        (folder / "optimizer.safetensors").write_bytes(b"whatever")
        book.commit(
            folder, Manifest(name=f"checkpoint-{step}", step=step, version=step // 50, digest="d" * 64, reward=reward)
        )
    book.close()
    return book.folder


def test_checkpoints_are_listed(kept: Path) -> None:
    done = tandem("checkpoints", "ls", "--checkpoint-dir", str(kept))
    assert (done.returncode, done.stderr) == (0, "")
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if line[:1] == "│"
    ]
    assert [row[:4] for row in rows] == [
        ["checkpoint-200 (best)", "200", "4", "0.500"],  # of the same content as the best
        ["checkpoint-100 (best)", "100", "2", "0.750"],
        ["best-performance (best)", "100", "2", "0.750"],
    ]


def test_a_checkpoint_is_exported(kept: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tandem("checkpoints", "export", "checkpoint-100", str(out), "--checkpoint-dir", str(kept))
    assert (done.returncode, done.stdout) == (0, f"wrote {out}\n")
    assert {path.name for path in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert inspect(out).digest == inspect(kept / "checkpoint-100").digest


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two adapters have learned, of which one has done three updates."""
    folder = tmp_path_factory.mktemp("learned")
    database = Database.open(folder)
    for name in ("policy", "other"):
        rows = Rows(name)
        database.write([rows.run(Counters(updates=3 * (name == "policy"), last_version=4), 1.0)])
    rows = Rows("policy")
    for number in (1, 2, 3):
        made = Trajectory(f"t{number}", "g", (1, 2), (3, 4), (-0.5, -1.0), (-0.5, -1.0), (1, 1), 1.0, number / 4)
        report = UpdateReport(number, number + 1, 1, 2, 1, 0, number / 4, 0.5, 1.0, 0.1, 0.0, 0.0, "ok", "published")
        database.write(
            [
                rows.learned(made.id, number, number, made),
                *rows.ended(number, Ended(number, "published", "d", number + 1), report),
            ]
        )
    database.write([rows.waiting(made_later(), 4, 2, 1), rows.gone("t5", 5, "stale")])
    database.close()
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "learn export policy --checkpoint-dir {}",
        "learn list --checkpoint-dir {}",
        "learn list --json --checkpoint-dir {}",
        "learn show policy --checkpoint-dir {}",
        f"adapters inspect {demo.ADAPTER_PATHS['shout']}",
        f"models {demo.MODEL_PATH}",
        "doctor --only python",
        "doctor --only python --json",
        "serve --help",
        "--help",
        "--version",
        "config show",
        "service install --dry-run",
    ],
)
def test_a_closed_pipe_ends_a_command_quietly(learned: Path, words: str) -> None:
    """As `tandem … | head` closes it: without a traceback, and with the status that shells know for this."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb", 0) as raw:
        out = io.TextIOWrapper(io.BufferedWriter(cast("io.RawIOBase", raw), 16), write_through=True)
        with mock.patch.object(sys, "stdout", out), contextlib.redirect_stderr(io.StringIO()) as said:
            status = on_a_thread(lambda: main(words.format(learned).split()))
    progress = [line for line in said.getvalue().splitlines() if line != "tandem: checking python"]
    assert (status, progress) == (141, [])


def test_a_pipe_that_closes_at_the_end_of_a_process_is_quiet(learned: Path) -> None:
    words = [sys.executable, "-m", "mlx_tandem", "learn", "export", "policy", "--checkpoint-dir", str(learned)]
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


def made_later() -> Trajectory:
    return Trajectory("t4", "h", (1,), (5,), (), (), (), 1.0, 1.0, external=True, metadata={"answer": "4"})


def test_what_was_learned_is_listed_shown_and_exported(learned: Path, tmp_path: Path) -> None:
    """For people and for programs; what is exported can be posted to `/v1/training/update`."""
    at = ("--checkpoint-dir", str(learned))
    table = tandem("learn", "list", *at).stdout
    assert [line.split("│")[1].strip() for line in table.splitlines() if line[:1] == "│"] == ["other", "policy"]
    other, policy = json.loads(tandem("learn", "list", "--json", *at).stdout)
    assert (other["updates"], other["mean_reward"], other["last_update"]) == (0, None, None)
    assert [policy[k] for k in ("updates", "version", "mean_reward", "waiting", "past")] == [3, 4, 0.75, 1, 3]
    rows = [
        line for line in tandem("learn", "show", "policy", "--last", "2", *at).stdout.splitlines() if line[:1] == "│"
    ]
    assert [[cell.strip() for cell in row.split("│")[1:7]] for row in rows] == [
        ["2", "published", "3", "1", "0", "0.5"],
        ["3", "published", "4", "1", "0", "0.75"],
    ]
    assert [u["update"] for u in json.loads(tandem("learn", "show", "policy", "--json", *at).stdout)] == [1, 2, 3]
    found = [json.loads(line) for line in tandem("learn", "export", "policy", *at).stdout.splitlines()]
    assert [(t["id"], t["state"], t["update"]) for t in found] == [
        ("t1", "learned", 1), ("t2", "learned", 2), ("t3", "learned", 3), ("t4", "waiting", None),
    ]  # fmt: skip
    assert found[0]["token_ids"] == [3, 4] and found[0]["logprobs"] == [-0.5, -1.0] and found[3]["logprobs"] is None
    posted = [{k: v for k, v in t.items() if k in External.__struct_fields__} for t in found]
    assert len(msgspec.convert(posted, list[External])) == 4
    out = tmp_path / "out.jsonl"
    assert tandem("learn", "export", "policy", "--out", str(out), *at).stdout == f"wrote 4 trajectories to {out}\n"
    assert [json.loads(line) for line in out.read_text().splitlines()] == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("list --checkpoint-dir nowhere", "there is no folder nowhere; name another one with --checkpoint-dir"),
        ("show", "name one of the adapters; {}/learning.db has: other, policy"),
        ("export nobody", "there is no run of 'nobody'; {}/learning.db has: other, policy"),
        ("export policy --out {}/learning.db", "{}/learning.db cannot be used: File exists"),
    ],
)
def test_what_was_not_learned_is_said_in_one_line(words: str, said: str, learned: Path) -> None:
    given = words.format(learned).split()
    given += [] if "--checkpoint-dir" in given else ["--checkpoint-dir", str(learned)]
    done = tandem("learn", *given)
    assert (done.returncode, done.stderr) == (1, f"tandem: {said.format(learned)}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ls --checkpoint-dir nowhere", "there is no folder nowhere; name another one with --checkpoint-dir"),
        ("export checkpoint-100 out --checkpoint-dir nowhere", "there is no folder nowhere"),
        ("export checkpoint-300 out --checkpoint-dir {kept}", "there is no checkpoint 'checkpoint-300'"),
        ("export ../kept out --checkpoint-dir {kept}", "checkpoint must be 1 to 64 letters"),
        ("export checkpoint-100 {kept} --checkpoint-dir {kept}", "{kept} exists"),
        ("rollback --yes --url http://127.0.0.1:9", "no server answers at 127.0.0.1:9: Connection refused"),
    ],
)
def test_what_cannot_be_done_with_a_checkpoint_is_one_line(kept: Path, words: str, said: str) -> None:
    done = tandem("checkpoints", *words.format(kept=kept).split())
    assert done.returncode == 1
    assert done.stderr.startswith(f"tandem: {said.format(kept=kept)}")
    assert len(done.stderr.splitlines()) == 1


class Training(BaseHTTPRequestHandler):
    """A server that learns, as far as a rollback asks it."""

    asked: ClassVar[list[str]] = []
    says: ClassVar[dict[str, Any]] = {"current_lora": "policy@7", "training_enabled": True}

    def answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.asked.append(f"{self.command} {self.path} {self.rfile.read(size).decode()}".strip())
        body = json.dumps(self.says).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = answer

    def log_message(self, *_: object) -> None:
        pass


def test_a_rollback_asks_on_a_terminal_and_wants_yes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    went = 'POST /v1/training/rollback {"to": "5"}'
    with ThreadingHTTPServer(("127.0.0.1", 0), Training) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        words = ("checkpoints", "rollback", "5", "--url", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
        done = tandem(*words)
        assert (done.returncode, Training.asked) == (1, [])
        assert done.stderr.endswith("without a terminal to ask on, confirm it with --yes\n")
        assert tandem(*words, "--yes").stdout == "back at policy@7\n"
        assert Training.asked == [went]
        kept = "tandem: nothing was changed"
        for key, last in (("n", kept), ("", kept), ("y", "back at policy@7")):
            Training.asked.clear()
            with on_terminal(*words, columns=80, rows=24) as terminal:
                asked = " ".join(terminal.read_until(lambda lines: any("[y/N]" in line for line in lines)))
                assert "serves and trains policy@7. Go back to 5?" in asked
                terminal.type(f"{key}\n")
                assert terminal.read_to_end()[-1].strip() == last
                assert terminal.process.wait() == (key != "y")
            assert (went in Training.asked) == (key == "y")
        server.shutdown()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", "no server answers at 127.0.0.1:9: Connection refused"),
        ("http://[::1]:9", "no server answers at [::1]:9: "),
        ("http://localhost:x", "'http://localhost:x' is not an http:// or https:// address"),
        ("ftp://localhost", "'ftp://localhost' is not an http:// or https:// address"),
    ],
)
def test_adapters_of_a_server_that_is_not_there(url: str, said: str) -> None:
    done = tandem("adapters", "ls", "--url", url)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tandem: {said}")


EVIL = "a\x1b]0;owned\x07\x9b2J\r\u202e"
ENTRY = {"id": EVIL, "rank": EVIL, "size_bytes": 1, "version": 1, "resident": True, "path": EVIL, "targets": [EVIL]}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("checkpoints rollback --yes", {"current_lora": EVIL}),
        ("adapters load a", ENTRY),
        ("adapters unload a", {"versions": [EVIL]}),
        ("adapters ls", {"adapters": [ENTRY | {"requests": 0, "generated_tokens": 0}]}),
        ("adapters ls", {"adapters": [{"version": None, "name": EVIL, "path": EVIL}]}),
    ],
)
def test_a_server_s_text_does_not_steer_the_terminal(
    words: str, says: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Training, "says", says)
    monkeypatch.setattr(Training, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Training) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        done = tandem(*words.split(), "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert done.returncode == 0
    assert done.stdout.replace("\n", "").isprintable()
    assert r"a\x1b]0;" in done.stdout


def test_an_adapter_s_text_does_not_steer_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(demo.ADAPTER_PATHS["shout"], folder)
    (file,) = folder.glob("*.safetensors")
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = {name.replace("q_proj", EVIL): entry for name, entry in json.loads(raw[8 : 8 + size]).items()}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    done = tandem("adapters", "inspect", str(folder))
    assert done.returncode == 0
    assert done.stdout.replace("\n", "").isprintable()
    assert r"self_attn.a\x1b]0;" in done.stdout
