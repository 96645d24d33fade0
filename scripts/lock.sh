#!/usr/bin/env bash
# Renew locks/*.txt from pyproject.toml: exact versions with hashes for every supported platform and Python version.
# Usage: scripts/lock.sh [path of uv] [further options of `uv pip compile`, such as --upgrade]
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${1:-uv}
shift || true

# bash 3.2, which macOS has, takes an empty array for an unset variable: hence ${array[@]+"${array[@]}"}.
resolve() { # file, the source of requirements, further options
    local file=$1 source=$2
    shift 2
    "$uv" pip compile "$source" --quiet --universal --python-version 3.11 --generate-hashes --no-header \
        --no-annotate --no-emit-index-url --no-emit-find-links "$@" ${options[@]+"${options[@]}"} -o "$file"
    echo "$file: $(grep -c '==' "$file") packages"
}

compile() { # file, then the extras
    local file=$1 extras=()
    shift
    for extra in "$@"; do extras+=(--extra "$extra"); done
    resolve "$file" pyproject.toml ${extras[@]+"${extras[@]}"}
}

# The packages of an extra without what these ask for themselves.
direct() {
    python3 -c 'import sys, tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*extras[sys.argv[1]], sep="\n")' "$1"
}

options=("$@")
mkdir -p locks
# One version of each package everywhere: locks/clients.txt and locks/vision.txt are installed on top of any other.
everything=$(mktemp)
trap 'rm -f "$everything"' EXIT
cat locks/macos.txt locks/clients.txt >"$everything" 2>/dev/null || true # versions that stay unless something forbids
compile "$everything" dev clients
options+=(--constraint "$everything")
compile locks/macos.txt dev
compile locks/cpu.txt dev cpu
compile locks/cuda12.txt dev cuda12
compile locks/cuda13.txt dev cuda13
compile locks/clients.txt clients
direct vision | resolve locks/vision.txt - --no-deps
