"""A headless browser, and a server that learns, for the tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from mlx_tandem import demo
from tests.api.learns import learning_config
from tests.page.browser import AXE, browser
from tests.serving import RunningServer, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for all tests; each page has a profile of its own."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = browser()
    if program is None or not AXE.exists():
        pytest.skip("make test-browser installs the browser and axe-core")
    with playwright.sync_playwright() as started:
        # A sandbox of its own needs rights that a container may not have; only this server's page is opened.
        running = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


class Opened:
    """A page, with what it asked for and what its console said."""

    def __init__(self, page: Page, url: str):
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        self.refuses = False
        """Whether the server refuses something in this test: a browser's console names every reply with an error."""
        self.asked: list[str] = []
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._hear)
        page.on("request", lambda request: self.asked.append(request.url))

    def _hear(self, said: ConsoleMessage) -> None:
        if said.type in ("error", "warning") and not (self.refuses and said.text.startswith("Failed to load resource")):
            self.complaints.append(said.text)

    def go(self, view: str = "") -> Page:
        """Open a view and wait until the server has told its state."""
        self.page.goto(f"{self.url}/{view}")
        if not view.startswith("docs"):
            self.page.locator("#state[data-status=ok]").wait_for()
        return self.page


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter root with one folder."""
    root = tmp_path_factory.mktemp("adapters")
    shutil.copytree(demo.ADAPTER_PATHS["json"], root / "moves")
    return root


@pytest.fixture(scope="module")
def learner(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that trains `policy` when it is told to, with the demo's adapters and the folders of `root`."""
    config = learning_config(tmp_path_factory.mktemp("learns"))
    with serving(structs.replace(config, adapter_root=str(root))) as running:
        yield running


@pytest.fixture
def opened(chromium: Browser, learner: RunningServer, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """A page of the server, 1280 px wide unless the test's parameter has other settings of the browser's profile.

    In the end its console has said nothing, and nothing was asked of any other server.
    """
    settings: dict[str, Any] = getattr(request, "param", {})
    profile = chromium.new_context(**({"viewport": {"width": 1280, "height": 900}} | settings))
    found = Opened(profile.new_page(), learner.url)
    yield found
    profile.close()
    assert not found.complaints
    assert all(url.startswith((learner.url, "data:")) for url in found.asked)
