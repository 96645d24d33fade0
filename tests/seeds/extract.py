"""What a document of another server names: flags, routes, metrics, file names and programs, found by their form.

`python tests/seeds/extract.py FOLDER` reads the four documents in FOLDER (named by the start of their file names) and
rewrites inventory.json beside this module; without an argument it only says what is there.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

INVENTORY = Path(__file__).with_name("inventory.json")
SERVERS = {"000": "MOLA", "001": "MLX ParaLLM", "002": "mlx-lm-server", "003": "MLX Server"}

NOT_ROUTES = ("/path", "/to", "/tmp", "/dev", "/bin", "/Users", "/Xcode", "/infiniband", "/ml-explore", "/docs")
SUFFIXES = "py|sh|safetensors|json|jinja|yaml|yml|swift|npz|metallib|txt|md"


def flags(text: str) -> set[str]:
    """Command-line options, long and short ones that a table or a command shows."""
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text))
    found |= {f"-{c}" for c in re.findall(r"(?:`|\s)-([mv])(?=,? (?:--|serve))", text)}
    return found


def routes(text: str) -> set[str]:
    """Paths of HTTP endpoints: after a method, in a URL of this machine, or under /v1."""
    found = set(re.findall(r"(?:GET|POST|DELETE|PUT) \|? ?`?(/[\w/{}.-]+)", text))
    found |= set(re.findall(r"(?:localhost|127\.0\.0\.1|node1):\d+(/[\w/.-]+)", text))
    found |= set(re.findall(r"`(/(?:v1|health|livez|readyz|metrics)[\w/{}.-]*)`", text))
    found |= set(re.findall(r"(?<=[\s`])(/v1/[\w/{}.-]+)", text))
    return {re.sub(r"(/v1/adapters)/(?!\{)\w+", r"\1/{name}", r.rstrip(".,:")) for r in found} - {"/v1"}


def metrics(text: str) -> set[str]:
    """Names of gauges and counters: a program's prefix, or a list that follows the word gauges."""
    found = set(re.findall(r"\bmlx_parallm_(?:rl|lora|checkpoint)\w+", text))
    for sentence in re.findall(r"gauges for (.*)", text):
        found |= set(re.findall(r"`(\w+)`", sentence))
    return found


def files(text: str) -> set[str]:
    """File names with a suffix that programs read, write or run."""
    return {
        name.rsplit("/", 1)[-1]
        for name in re.findall(rf"(?<![\w*{{.])((?:[\w.-]+/)*[A-Za-z_][\w.-]*\.(?:{SUFFIXES}))(?![\w(])", text)
    }


def variables(text: str) -> set[str]:
    """Environment variables."""
    return set(re.findall(r"\$([A-Z][A-Z0-9_]{3,})", text)) - {"METALLIB", "METALLIB_PATH", "API_KEY"}


def keys(text: str) -> set[str]:
    """Keys of a YAML block, with their section."""
    found: set[str] = set()
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        section = ""
        for line in block.splitlines():
            if m := re.match(r"(\w+):\s*$", line):
                section = m[1]
            elif m := re.match(r"\s+(\w+):", line):
                found.add(f"{section}.{m[1]}")
    return found


KINDS: dict[str, Callable[[str], set[str]]] = {
    "flags": flags,
    "routes": routes,
    "metrics": metrics,
    "files": files,
    "variables": variables,
    "keys": keys,
}


def extract(text: str) -> dict[str, list[str]]:
    return {kind: sorted(find(text)) for kind, find in KINDS.items()}


def read(folder: Path) -> dict[str, dict[str, list[str]]]:
    """The inventory of the documents in `folder`."""
    found = {}
    for start, name in SERVERS.items():
        (path,) = folder.glob(f"{start}*")
        found[name] = extract(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        INVENTORY.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
    print(INVENTORY.read_text(encoding="utf-8"))
