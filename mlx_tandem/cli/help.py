"""The help of every command: plain text in sections, with every name of an option whole on one line."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from mlx_tandem.cli.console import leave_pipe
from mlx_tandem.printable import printable

NAMES = 30
"""Widest column of names. A longer name has a line to itself, with its explanation on the next."""


class Command(TyperCommand):
    """A command whose help has a section for its arguments, one for its options, and one for each panel of options."""

    def note(self, ctx: Any, param: Any) -> str:
        """Return a sentence that follows the explanation of a parameter; empty for none."""
        return ""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help."""
        _write_options(self, ctx, formatter, self.note)


OTHER_WORDS = {
    "ls": ("list", "show"),
    "load": ("add", "register"),
    "unload": ("delete", "remove", "rm"),
    "inspect": ("info", "show"),
    "clear": ("clean", "delete", "prune", "remove", "rm"),
    "check": ("verify",),
    "rollback": ("restore", "revert"),
    "sft": ("finetune", "lora"),
    "rl": ("grpo", "online"),
    "chat": ("run", "ask", "repl"),
    "ps": ("servers",),
    "top": ("htop", "monitor"),
    "logs": ("log",),
    "pull": ("download", "fetch"),
    "models": ("model",),
}
"""Other words for the commands of a group, as other programs have them."""


class Group(TyperGroup):
    """A group of commands, whose help explains each of them by the whole first sentence of its description."""

    elsewhere: Mapping[str, str] = {}
    """Words that are commands of other programs, with the command or option that replaces each of them here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command; the version and the help are printed here, perhaps to a closed pipe."""
        try:
            return super().parse_args(ctx, args)
        except BrokenPipeError:
            leave_pipe()

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and end the process quietly if whoever reads its output goes before its end."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            leave_pipe()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is called. If a word is no command, end the process and name the nearest one."""
        word = args[0] if args else ""
        if word and not word.startswith("-") and self.get_command(ctx, word) is None:
            ctx.fail(f"There is no command '{printable(word, 80)}'{self._hint(ctx, word)}")
        return super().resolve_command(ctx, args)

    def _hint(self, ctx: Any, word: str) -> str:
        """Return the rest of a sentence that begins with a word that is no command."""
        commands = self.list_commands(ctx)
        others = {other: command for command in commands for other in OTHER_WORDS.get(command, ())}
        near = next(iter(difflib.get_close_matches(word, [*commands, *others, *self.elsewhere], n=1)), "")
        if near in commands or near in others:
            return f"; did you mean '{ctx.command_path} {others.get(near, near)}'?"
        if near:
            return f": {self.elsewhere[near]}."
        return f"; there are {', '.join(commands)}."

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of the help."""
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section of the commands."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        _write_section(
            formatter,
            "Commands",
            [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command is not None],
        )


ELSEWHERE = {
    "generate": "'tandem chat --prompt TEXT' answers a question",
    "list": "'tandem models' lists the models of this machine, and 'tandem adapters ls' what a server knows",
    "show": "'tandem models PATH' says what a model folder is, and 'tandem adapters ls' what a server knows",
    "sft": "'tandem train sft DATA' teaches an adapter from examples, 'tandem train rl' from rewards",
    "convert": "'tandem adapters convert' writes an adapter in another format; models are served as they are",
    "start": "'tandem serve MODEL' starts a server for any client of OpenAI's, Anthropic's or Ollama's API",
}
"""Commands that other programs have, and where to find here what they do."""
ELSEWHERE |= {"ls": ELSEWHERE["list"]}
ELSEWHERE |= {"finetune": ELSEWHERE["sft"], "lora": ELSEWHERE["sft"]}


class RootGroup(Group):
    """The group of all commands. It knows some words of other programs, and reports a model in place of a command."""

    elsewhere = ELSEWHERE

    def _hint(self, ctx: Any, word: str) -> str:
        """Return the rest of a sentence that begins with a word that is no command."""
        if "/" in word or Path(word).is_dir():
            return f": 'tandem serve {printable(word, 80)}' serves a model."
        return super()._hint(ctx, word)


def group(help: str, *, no_args_is_help: bool = True, is_root: bool = False) -> typer.Typer:
    """Return a new group of commands that is written like all others; -h and --help print its help."""
    return typer.Typer(
        cls=RootGroup if is_root else Group,
        help=help,
        no_args_is_help=no_args_is_help,
        add_completion=is_root,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # typer's tables cut what is longer than their column
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _write_options(
    command: TyperCommand | TyperGroup, ctx: Any, formatter: Any, note: Callable[[Any, Any], str] = lambda *_: ""
) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        if record := param.get_help_record(ctx):
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            panel = sections.setdefault(getattr(param, "rich_help_panel", None) or usual, [])
            panel.append((record[0], f"{record[1]} {note(ctx, param)}".strip()))
    for name, records in sections.items():
        _write_section(formatter, name, records)


def _write_section(formatter: Any, title: str, records: list[tuple[str, str]]) -> None:
    """Write names with their explanations in two columns; nothing if there are none."""
    if not records:
        return
    left = min(max(len(name) for name, _ in records), NAMES) + 2
    with formatter.section(title):
        margin = " " * formatter.current_indent
        for name, text in records:
            lines = textwrap.wrap(
                text, formatter.width - len(margin) - left, break_on_hyphens=False, break_long_words=False
            )
            if len(name) > left - 2 or not lines:
                formatter.write(f"{margin}{name}\n")
            else:
                formatter.write(f"{margin}{name:<{left}}{lines.pop(0)}\n")
            for line in lines:
                formatter.write(f"{margin}{'':<{left}}{line}\n")
