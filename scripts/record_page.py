"""Take the pictures of the page in docs/: a real server that learns and answers others, in a headless browser.

python -m scripts.record_page [docs]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from playwright.sync_api import Browser, Page, sync_playwright

from mlx_tandem.cli.demo import traffic
from mlx_tandem.cli.demo.learner import SETTINGS, Learner
from mlx_tandem.cli.own_server import ROOM, started_server
from tests.page.browser import browser

SIZE = {"width": 1280, "height": 860}
UPDATES, STREAMS = 16, 3
"""Updates that the server has learned from when the pictures are taken, and streams of other requests meanwhile."""


@contextmanager
def learning(folder: Path) -> Iterator[str]:
    """Start a server that learns with the settings of `tandem demo learn`, and yield its URL."""
    settings = folder / "settings.yaml"
    checkpoints = {"checkpoint_dir": str(folder / "checkpoints"), "interval": 20}
    disk = {"dir": str(folder / "cache")}
    text = yaml.safe_dump({"rl_training": SETTINGS, "checkpointing": checkpoints, "disk": disk})
    settings.write_text(text, encoding="utf-8")
    with started_server(*ROOM, "--config", str(settings)) as url:
        yield url


async def teach(url: str) -> None:
    """Teach the server, and have it answer other requests until it has learned."""
    beside = asyncio.create_task(traffic.run(url, traffic.Traffic(), STREAMS))
    try:
        await Learner(url, seed=1).learn(UPDATES)
    finally:
        beside.cancel()


def opened(program: Browser, url: str, scheme: str) -> Page:
    """Return a page of the server in a colour scheme, which is `light` or `dark`."""
    page = program.new_page(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(url)
    page.locator("#state[data-status=ok]").wait_for()
    return page


def record(folder: Path) -> None:
    """Write the pictures into a folder."""
    with tempfile.TemporaryDirectory() as scratch, learning(Path(scratch)) as url, sync_playwright() as started:
        program = started.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        page = opened(program, url, "light")
        teaching = threading.Thread(target=asyncio.run, args=(teach(url),))
        teaching.start()
        while teaching.is_alive():
            page.wait_for_timeout(500)  # the page looks once a second meanwhile
        page.screenshot(path=folder / "page-overview.png")
        dark = opened(program, f"{url}/#learning", "dark")
        dark.locator("#updates tbody tr").first.wait_for()
        dark.screenshot(path=folder / "page-learning.png")
        page.get_by_role("link", name="Adapters").click()
        page.locator("#adapter-table tbody tr").first.wait_for()
        page.screenshot(path=folder / "page-adapters.png")
        page.get_by_role("link", name="Playground").click()
        page.locator("#models input").first.wait_for()
        page.get_by_role("button", name="Ask", exact=True).click()
        page.locator(".answer .judge:visible").nth(2).wait_for()
        page.get_by_role("button", name="Audit").nth(1).click()
        page.mouse.move(0, 0)
        page.screenshot(path=folder / "page-playground.png")
        program.close()


if __name__ == "__main__":
    record(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
