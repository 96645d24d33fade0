"""Which browser the page is tested in. As a program, it ends with status 1 where there is none."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ON_A_MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
AXE = Path(__file__).parent / "npm" / "node_modules" / "axe-core" / "axe.min.js"
"""The checks of accessibility that `scripts/install_browser.sh` installs."""


def browser() -> str | None:
    """The path of a Chromium or Chrome on this machine."""
    found = [path for name in NAMES if (path := shutil.which(name))]
    return next(iter(found), str(ON_A_MAC) if ON_A_MAC.exists() else None)


if __name__ == "__main__":
    sys.exit(browser() is None)
