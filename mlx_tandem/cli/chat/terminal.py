"""A chat on a terminal: lines that are typed, commands among them, and answers that are written as they come."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import Callable

from mlx_tandem.cli.chat.conversation import Answer, Conversation, Refused
from mlx_tandem.cli.console import say
from mlx_tandem.http_client import HttpError
from mlx_tandem.printable import printable

HELP = """\
/adapter         list the models and adapters of the server
/adapter NAME    let NAME answer from now on; the conversation goes on
/system TEXT     tell the model how to answer (/system none: nothing)
/history         show the conversation
/clear           forget the conversation
/quit            end (or Ctrl-D); Ctrl-C stops an answer"""

_THOUGHT, _PLAIN = "\x1b[2m", "\x1b[0m"


class Writer:
    """Writes an answer piece by piece.

    On a terminal, thoughts are dim and characters that would control it become escapes. Elsewhere the answer's text is
    written as it is, without thoughts.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._dims = self._terminal and os.environ.get("TERM") != "dumb"
        self._thinks = False
        self._at_start = True

    def __call__(self, text: str, is_thought: bool) -> None:
        """Write a piece."""
        if not self._terminal:
            if not is_thought:
                self._write(text)
            return
        if is_thought != self._thinks:
            self._turn(is_thought)
        self._write("\n".join(printable(line, 8 * len(line)) for line in text.replace("\t", "    ").split("\n")))

    def end(self) -> None:
        """End the line of the answer."""
        if self._thinks:
            self._turn(False)
        if not self._at_start:
            self._write("\n")

    def _turn(self, thinks: bool) -> None:
        """Begin or end a thought, which has lines of its own."""
        self._thinks = thinks
        if not self._at_start:
            self._write("\n")
        if self._dims:
            sys.stdout.write(_THOUGHT if thinks else _PLAIN)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._at_start = text.endswith("\n") if text else self._at_start


def ask(runner: asyncio.Runner, conversation: Conversation, question: str) -> bool:
    """Ask and write the answer; return whether there was one. Ctrl-C stops the answer and keeps what there is of it."""
    writer = Writer()
    problem = ""
    answer = Answer()
    try:
        answer = runner.run(conversation.ask(question, writer))
    except KeyboardInterrupt:
        problem = "stopped"
    except (Refused, HttpError) as e:
        problem = str(e)
    writer.end()
    if answer.finish_reason == "length":
        say(f"the answer is cut off after {answer.tokens} tokens (--max-tokens)")
    if problem:
        say(problem)
    return not problem


class Chat:
    """The lines of a person, answered one after the other."""

    def __init__(self, runner: asyncio.Runner, conversation: Conversation, address: str):
        self._runner, self._conversation, self._address = runner, conversation, address
        self._commands: dict[str, Callable[[str], None]] = {
            "adapter": self._adapter,
            "system": self._system,
            "history": lambda _: self._history(),
            "clear": lambda _: conversation.messages.clear(),
            "help": lambda _: print(HELP),
        }

    def run(self) -> None:
        """Read and answer lines until the person ends the chat."""
        import readline  # noqa: F401 - gives input() editing and a history

        print(f"{printable(self._conversation.model)} at {self._address}; /help lists the commands, Ctrl-D ends")
        while True:
            try:
                line = _typed(f"{printable(self._conversation.model, 40)}> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                say("Ctrl-D or /quit ends the chat")
                continue
            word, _, rest = line.strip().partition(" ")
            if word in ("/quit", "/exit", "/bye"):
                return
            if word.startswith("/") and "/" not in word[1:]:
                self._command(word[1:], rest.strip())
            elif word:
                ask(self._runner, self._conversation, line.strip())

    def _command(self, name: str, rest: str) -> None:
        command = self._commands.get(name)
        if command is None:
            say(f"there is no command /{name}; /help lists them")
            return
        try:
            command(rest)
        except (Refused, HttpError) as e:
            say(str(e))

    def _adapter(self, name: str) -> None:
        if name:
            self._runner.run(self._conversation.choose(name))
            return
        for each in self._runner.run(self._conversation.models()):
            print(f"{'*' if each == self._conversation.model else ' '} {printable(each)}")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "none" else text
        print(f"system: {printable(self._conversation.system) or 'none'}")

    def _history(self) -> None:
        for message in self._conversation.messages:
            print(f"{message['role']}: {printable(message['content'])}")
        if not self._conversation.messages:
            print("nothing was said yet")


def _typed(prompt: str) -> str:
    """Return the next line, or all lines of a text that was pasted, unless it begins with a command. Raise EOFError at
    the end of the input.
    """
    lines = [input(prompt)]
    while not lines[0].startswith("/") and select.select([sys.stdin], [], [], 0)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines)
