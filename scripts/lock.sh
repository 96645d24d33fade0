#!/usr/bin/env bash
# Renew locks/*.txt from pyproject.toml: exact versions with hashes for every supported platform and Python version.
# Usage: scripts/lock.sh [path of uv] [further options of `uv pip compile`, such as --upgrade]
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${1:-uv}
shift || true

# bash 3.2, which macOS has, takes an empty array for an unset variable: hence ${array[@]+"${array[@]}"}.
compile() { # name, then the extras
    local name=$1 extras=()
    shift
    for extra in "$@"; do extras+=(--extra "$extra"); done
    "$uv" pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes --no-header \
        --no-annotate --no-emit-index-url --no-emit-find-links ${extras[@]+"${extras[@]}"} ${options[@]+"${options[@]}"} \
        -o "locks/$name.txt"
    echo "locks/$name.txt: $(grep -c '==' "locks/$name.txt") packages"
}

options=("$@")
mkdir -p locks
compile macos dev
# One version of each package everywhere: locks/clients.txt is installed on top of any of the others.
options+=(--constraint locks/macos.txt)
compile cpu dev cpu
compile cuda12 dev cuda12
compile cuda13 dev cuda13
compile clients clients
