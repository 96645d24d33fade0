"""Write `mlx_tandem/model/kernels/recorded.json.gz`, the modules that MLX compiles by itself during starts on a GPU.

    MLX_PTX_CACHE_DIR=/tmp/serve python -m mlx_tandem serve MODEL      # on a GPU, with an empty folder for each group
    python scripts/record_modules.py --mlx ~/mlx serve=/tmp/serve adapters=/tmp/adapters

MLX writes the texts that it compiles into that folder. The headers that they include are taken from a checkout of MLX,
and compared with what the installed library contains. A module belongs to the first group whose folder has it.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import mmap
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec

from mlx_tandem.model.kernels import nvrtc
from mlx_tandem.model.kernels.nvrtc import Module, Recorded

HEADERS = "mlx/backend/cuda/device/"


def installed() -> Path | None:
    """Return the library of the installed MLX."""
    spec = importlib.util.find_spec("mlx")
    files = (Path(root) / "lib" / "libmlx.so" for root in (spec and spec.submodule_search_locations) or ())
    return next((file for file in files if file.exists()), None)


def modules(folder: Path) -> Iterator[Module]:
    """Yield the modules in a folder of MLX's, in the order in which MLX wrote them."""
    for file in sorted(folder.rglob("*.cu"), key=lambda file: file.stat().st_mtime):
        instances = [line.split("\t")[0] for line in file.with_suffix(".txt").read_text().splitlines()]
        name = "".join(file.relative_to(folder).with_suffix("").parts)
        yield Module(name, "", file.read_text(), tuple(instances))


def included(texts: list[str], source: Path, library: mmap.mmap) -> dict[str, str]:
    """Return the headers that these texts include, directly or through each other. Exit if MLX has others."""
    found: dict[str, str] = {}
    todo = list(texts)
    while todo:
        for name in re.findall(rf'#include "({HEADERS}\S+)"', todo.pop()):
            if name not in found:
                text = re.sub(rb"[^\x00-\x7f]", b" ", (source / name).read_bytes())  # as MLX's build does it
                if library.find(text) < 0:
                    sys.exit(f"the installed MLX has another {name}: check out the version {version('mlx')}")
                found[name] = text.decode()
                todo.append(found[name])
    return found


def main() -> None:
    """Record the modules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="GROUP=FOLDER", help=f"groups: {', '.join(nvrtc.GROUPS)}")
    parser.add_argument("--mlx", type=Path, required=True, help="a checkout of MLX")
    parser.add_argument("--library", type=Path, default=installed(), help="MLX's library; by default the installed one")
    args = parser.parse_args()
    found: dict[str, Module] = {}
    for group, _, folder in (each.partition("=") for each in args.groups):
        if group not in nvrtc.GROUPS:
            parser.error(f"there is no group {group!r}")
        for module in modules(Path(folder)):
            found.setdefault(module.name, msgspec.structs.replace(module, group=group))
    with args.library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        headers = included([module.text for module in found.values()], args.mlx, library)
    own = Recorded(version("mlx"), headers, tuple(found.values()))
    target = Path(nvrtc.__file__).with_name(nvrtc.FILE)
    target.write_bytes(gzip.compress(msgspec.json.encode(own), mtime=0))
    print(f"{len(found)} modules in {target.stat().st_size} bytes: {target}")


if __name__ == "__main__":
    main()
