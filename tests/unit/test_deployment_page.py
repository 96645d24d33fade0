"""What docs/deployment.md shows and test_docs.py cannot run: files of other programs, and servers behind them."""

from __future__ import annotations

import configparser
import plistlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from starlette.routing import Route

from mlx_tandem.cli.app import app
from mlx_tandem.config import Config
from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.server.app import create_app
from tests.serving import demo_config

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def units() -> list[configparser.ConfigParser]:
    found = []
    for text in blocks("ini"):
        parser = configparser.ConfigParser(interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(text)
        found.append(parser)
    return found


def command_lines() -> Iterator[list[str]]:
    """The words behind `tandem serve`, wherever the page starts a server."""
    for text in blocks("text"):
        yield from (shlex.split(line)[2:] for line in text.splitlines() if line.startswith("tandem serve"))
    for unit in units():
        if "tandem serve" in (line := unit.get("Service", "ExecStart", fallback="")):
            yield shlex.split(line)[2:]
    for plist in blocks("xml"):
        words = plistlib.loads(plist.encode())["ProgramArguments"]
        yield words[words.index("serve") + 1 :]
    for text in blocks("yml"):
        for service in yaml.safe_load(text).get("services", {}).values():
            yield service["command"][1:]


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_command_lines_have_options_that_exist(words: list[str]) -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    context = serve.make_context("serve", list(words))
    assert context.params["config"] is None
    assert not context.args


def test_all_kinds_of_files_are_looked_at() -> None:
    assert len(list(command_lines())) >= 5
    assert len(units()) == 3


def test_probes_ask_for_paths_that_exist() -> None:
    def launch() -> object:
        raise AssertionError("nothing is started here")

    config: Config = demo_config()
    paths = {r.path for r in create_app(ServerFront(config, launch)).routes if isinstance(r, Route)}  # type: ignore[arg-type]
    asked = set(re.findall(r"(?:localhost|127\.0\.0\.1:8000)(/[\w/]*)", PAGE)) | set(re.findall(r"path: (/\w+)", PAGE))
    assert asked == {"/livez", "/readyz", "/v1/models"}
    assert asked <= paths


def test_a_drain_has_the_time_that_it_may_take() -> None:
    """Whatever ends the server waits for longer than `--drain-seconds`."""
    waits = [
        int(n) for n in re.findall(r"(?:TimeoutStopSec=|stop_grace_period: |PeriodSeconds: |<integer>)(\d+)", PAGE)
    ]
    assert len(waits) == 4
    assert min(waits) > demo_config().server.drain_seconds
    (service, *_) = units()
    assert service["Service"]["KillMode"] == "mixed"


def test_a_mac_serves_as_a_program_that_is_in_use_and_stays_awake() -> None:
    (plist,) = blocks("xml")
    job = plistlib.loads(plist.encode())
    assert job["ProcessType"] == "Interactive"
    assert job["ProgramArguments"][:2] == ["/usr/bin/caffeinate", "-i"]
