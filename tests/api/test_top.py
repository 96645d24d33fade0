"""`tandem top` and `tandem status`: on a terminal, in a pipe, and while a server starts."""

from __future__ import annotations

import json
import re
import signal
import threading

import pytest

from tests.serving import RunningServer
from tests.terminal import Terminal, on_terminal
from tests.unit.cli_tools import tandem


def top(server: RunningServer) -> tuple[str, ...]:
    return ("top", "--url", server.url, "--interval", "0.1")


def leave(terminal: Terminal, how: str) -> None:
    """End the view; the terminal is as a shell needs it."""
    if how == "q":
        terminal.type("q")
    else:
        terminal.process.send_signal(signal.SIGTERM)
    lines = terminal.read_to_end()
    assert terminal.process.wait(30) == 0
    assert terminal.shows_keys and terminal.has_cursor
    assert "Traceback" not in "\n".join(lines) and "q" not in lines[-1]


@pytest.mark.parametrize(("columns", "how"), [(80, "q"), (40, "SIGTERM")])
def test_a_terminal_shows_what_the_server_does(server: RunningServer, columns: int, how: str) -> None:
    with on_terminal(*top(server), columns=columns, rows=24) as terminal:
        terminal.read_until(lambda lines: any(line.startswith("adapter ") for line in lines))
        answering = threading.Thread(target=lambda: server.chat("hi", model="shout", max_tokens=250, ignore_eos=True))
        answering.start()

        def busy(lines: list[str]) -> bool:
            first = next((i for i, line in enumerate(lines) if line.startswith("adapter ")), len(lines))
            rate = re.search(r"^tokens    (\d+)/s out, ", "\n".join(lines), re.MULTILINE)
            return rate is not None and rate[1] != "0" and bool(re.match(r"shout@1 +1 ", "".join(lines[first + 1 :])))

        lines = terminal.read_until(busy)
        answering.join()
        assert max(map(len, lines)) <= columns
        assert any(re.match(r"requests  1 run, 0 wait, ", line) for line in lines)
        assert any(re.match(r"KV pool   \d+ of 1,024 blocks", line) for line in lines)
        assert "█" in "".join(lines), "the curve"
        assert not terminal.shows_keys
        leave(terminal, how)


def test_programs_get_json_and_a_pipe_one_picture(server: RunningServer) -> None:
    server.chat("hi", model="json")
    for words in (("status", "--json"), ("top", "--json")):
        done = tandem(*words, "--url", server.url)
        told = json.loads(done.stdout)
        assert (told["status"], told["model"], told["learning"]) == ("ok", "tandem-demo", None)
        assert told["adapters"]["json@1"]["requests"] >= 1 and told["free_blocks"] > 0
        assert {"base", "shout@1", "down@1"} <= told["adapters"].keys()
    picture = tandem("top", "--url", server.url).stdout
    assert picture.splitlines()[0] == f"{server.url} · tandem-demo · ok"
    assert "\x1b" not in picture and "json@1" in picture


def test_a_server_that_does_not_answer_is_one_line() -> None:
    for words in (("top", "--once"), ("status", "--json")):
        done = tandem(*words, "--url", "http://127.0.0.1:9")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "tandem: no server answers at 127.0.0.1:9: Connection refused (--url)\n"
