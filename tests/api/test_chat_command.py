"""`tandem chat`: one question from an option or a pipe, and a chat on a terminal."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_tandem import demo
from tests import scripted_model
from tests.scripted_model import Script
from tests.serving import RunningServer, demo_config, serving
from tests.terminal import Terminal, on_terminal

QUESTION = "Sort down: 5 3 9 1"
KEY = "a-key-of-some-length"


def chat(*words: str, piped: str | bytes = "", model: str | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "mlx_tandem", "chat", *([model] if model else []), *words]
    data = piped.encode() if isinstance(piped, str) else piped
    return subprocess.run(command, input=data, capture_output=True, check=False, timeout=120)


def at(server: RunningServer, *words: str) -> list[str]:
    return ["--url", server.url, "--temperature", "0", *words]


def said(server: RunningServer, model: str, *questions: str) -> str:
    """The answer to the last question, where the ones before it are answered by the same model."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        body = {"model": model, "messages": messages, "temperature": 0}
        reply = server.client.post("/v1/chat/completions", json=body).json()
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return messages[-1]["content"]


@pytest.mark.parametrize("model", ["base", "shout"])
def test_a_question_is_answered_on_standard_output_and_nothing_else(server: RunningServer, model: str) -> None:
    expected = said(server, model, QUESTION)
    for done in (
        chat(*at(server, "-p", QUESTION, "--adapter", model)),
        chat(*at(server, "--adapter", model), piped=f"{QUESTION}\n"),
        chat(*at(server), piped=QUESTION, model=model),
    ):
        assert (done.returncode, done.stdout.decode(), done.stderr) == (0, f"{expected}\n", b"")


def test_a_question_and_what_is_piped_are_one_message(server: RunningServer) -> None:
    expected = said(server, "base", "Reverse:\n\ngarden")
    assert chat(*at(server, "-p", "Reverse:"), piped="garden\n").stdout.decode() == f"{expected}\n"


def test_a_pipe_that_stays_open_is_mentioned(server: RunningServer) -> None:
    """Some shells leave a program a standard input that never ends."""
    words = [sys.executable, "-m", "mlx_tandem", "chat", *at(server, "-p", QUESTION)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert process.stderr.readline().startswith(b"tandem: waiting for the end of standard input")
        process.stdin.close()
        assert process.stdout.read().decode() == said(server, "base", QUESTION) + "\n"
        assert process.wait(30) == 0


def test_how_the_model_answers_can_be_told(server: RunningServer) -> None:
    done = chat(*at(server, "-p", "Tell me a short story about a fox.", "--max-tokens", "3"))
    assert done.returncode == 0
    assert done.stderr.decode() == "tandem: the answer is cut off after 3 tokens (--max-tokens)\n"
    assert chat(*at(server, "-p", QUESTION, "--system", "Be brief.")).returncode == 0


@pytest.mark.parametrize(
    ("words", "piped", "problem"),
    [
        (["--adapter", "shuot", "-p", "x"], b"", "did you mean 'shout'?"),
        (["-p", ""], b"", "nothing is asked: give a question with --prompt"),
        ([], b" \n ", "nothing is asked: give a question with --prompt"),
        (["-p", "word " * 9000], b"", "the server answered with 400: "),
    ],
)
def test_errors_are_one_line_and_status_1(server: RunningServer, words: list[str], piped: bytes, problem: str) -> None:
    done = chat(*at(server), *words, piped=piped)
    assert done.returncode == 1
    assert done.stdout == b""
    [line] = done.stderr.decode().splitlines()
    assert line.startswith("tandem: ")
    assert problem in line


def test_a_wrong_address_and_a_name_that_nobody_has(server: RunningServer) -> None:
    done = chat("--url", "http://127.0.0.1:9", "-p", "x")
    assert (done.returncode, done.stderr) == (
        1,
        b"tandem: no server answers at 127.0.0.1:9: Connection refused (--url)\n",
    )
    done = chat(*at(server), "-p", "x", model="nobody")
    assert done.returncode == 1
    assert b"the model 'nobody' does not exist" in done.stderr


def test_a_key_is_asked_for_and_sent(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY, encoding="utf-8")
    (tmp_path / "key").chmod(0o600)
    with serving(demo_config(api_key=KEY)) as guarded:
        refused = chat("--url", guarded.url, "-p", QUESTION)
        assert refused.returncode == 1
        assert b"a valid API key is needed" in refused.stderr
        words = ["--url", guarded.url, "--temperature", "0", "-p", QUESTION]
        assert chat(*words, "--api-key-file", str(tmp_path / "key")).stdout.strip()


def test_without_a_server_one_is_started_and_stopped(tmp_path: Path, server: RunningServer) -> None:
    """A running server that has another model does not answer for the one that is named."""
    shutil.copytree(demo.MODEL_PATH, tmp_path / "my-model")
    done = chat(*at(server), "-p", QUESTION, model=str(tmp_path / "my-model"))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == said(server, "base", QUESTION) + "\n"
    assert b"does not serve" in done.stderr
    done = chat(*at(server), "-p", "x", model=str(tmp_path))
    assert done.returncode == 1
    assert b"the server did not start: " in done.stderr


# -- On a terminal ---------------------------------------------------------------------------------------------------


class Typist:
    """A person at a terminal of 80 columns."""

    def __init__(self, terminal: Terminal):
        self.terminal = terminal

    def sees(self, *texts: str) -> list[str]:
        """Wait until each text stands on the screen and the next line may be typed."""
        return self.terminal.read_until(
            lambda lines: bool(lines) and lines[-1].endswith(">") and all(t in "\n".join(lines) for t in texts)
        )

    def types(self, line: str) -> None:
        self.terminal.type(f"{line}\n")


@pytest.fixture
def typist(server: RunningServer) -> Iterator[Typist]:
    with on_terminal("chat", *at(server), columns=80, rows=60) as terminal:
        typist = Typist(terminal)
        typist.sees("/help lists the commands")
        yield typist


def test_a_chat_goes_on_with_another_adapter(server: RunningServer, typist: Typist) -> None:
    first = said(server, "base", QUESTION)
    typist.types(QUESTION)
    typist.sees(first)
    typist.types("/adapter")
    typist.sees("  shout", "  json")
    typist.types("/adapter shout")
    typist.sees("shout>")
    typist.types("What is 17 + 25?")
    typist.sees("42")
    typist.types("/history")
    typist.sees(f"user: {QUESTION}", f"assistant: {first}", "user: What is 17 + 25?")
    typist.types("/clear")
    typist.types("/history")
    typist.sees("nothing was said yet")
    typist.types("/adapter nobody")
    typist.sees("the model 'nobody' does not exist")
    typist.types("/system Be brief.")
    typist.sees("system: Be brief.")
    typist.types("/wrong")
    typist.sees("there is no command /wrong; /help lists them")
    typist.terminal.type("\x04")
    lines = typist.terminal.read_to_end()
    assert typist.terminal.process.wait(30) == 0
    assert max(map(len, lines)) <= 80


def test_a_text_that_is_pasted_is_one_question(server: RunningServer, typist: Typist) -> None:
    expected = said(server, "base", "Reverse:\ngarden")
    typist.types("Reverse:\ngarden")
    typist.sees(expected)
    typist.types("/history")
    typist.sees("user: Reverse:\\ngarden")
    typist.types("/quit")
    typist.terminal.read_to_end()
    assert typist.terminal.process.wait(30) == 0


def test_ctrl_c_stops_an_answer_and_not_the_chat(scripted_folder: Callable[[Script], Path]) -> None:
    """What had been answered stays in the conversation."""
    folder = scripted_folder(Script({"count": "and one more " * 1200, "stop": "It stops."}, context=16384))
    with (
        serving(scripted_model.config(folder)) as server,
        on_terminal("chat", "--url", server.url, "--max-tokens", "8000", columns=80, rows=300) as terminal,
    ):
        typist = Typist(terminal)
        typist.sees("/help lists the commands")
        typist.types("count")
        terminal.read_until(lambda lines: "and one more" in "\n".join(lines))
        terminal.process.send_signal(signal.SIGINT)
        typist.sees("tandem: stopped")
        typist.types("stop")
        typist.sees("It stops.")
        typist.types("/history")
        typist.sees("user: count", "assistant: and one more", "assistant: It stops.")
        terminal.process.send_signal(signal.SIGINT)
        typist.sees("Ctrl-D or /quit ends the chat")


def test_an_answer_cannot_control_the_terminal_and_its_thoughts_are_set_apart(
    scripted_folder: Callable[[Script], Path],
) -> None:
    thought = "<think>\na thought\n</think>\n\n"
    says = {"evil": thought + "red \x1b[31m text\x07\nand more", "plain": thought + "x\x1b[0my"}
    marks = ("<think>", "</think>")
    folder = scripted_folder(Script(says, signs="".join(marks), special=marks))
    with serving(scripted_model.config(folder)) as server:
        with on_terminal("chat", "--url", server.url, columns=80, rows=30) as terminal:
            typist = Typist(terminal)
            typist.sees("/help lists the commands")
            typist.types("evil")
            lines = typist.sees("and more")
            assert "a thought" in lines
            assert "red \\x1b[31m text\\x07" in lines
        assert chat("--url", server.url, "-p", "plain").stdout == b"x\x1b[0my\n"
