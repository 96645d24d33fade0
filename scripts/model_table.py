"""Write the table of model families in docs/models.md: which are served, what they cache, and why others are refused.

python -m scripts.model_table

Each family of the installed mlx-lm is made with tiny random weights, and examined as a start examines a model. Families
that cannot be made so are left out of the table and listed below it.
"""

from __future__ import annotations

import pkgutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import models

from mlx_tandem.config import CacheConfig, EngineConfig, ModelConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model.summary import summarise
from tests import tiny_families, tiny_models

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families: python -m scripts.model_table -->\n", "<!-- end of families -->\n"

MOST_PARAMETERS = 4_000_000
"""A family whose settings fall back to the sizes of a real model is not tried."""

CACHED = {"attention": "all positions", "window": "a window", "state": "a state"}
"""What a cache group holds, in words."""


def families() -> Iterator[str]:
    """Yield the names of mlx-lm's families, in order."""
    for module in sorted(found.name for found in pkgutil.iter_modules(models.__path__)):
        try:
            found = tiny_families.module_of(module)
        except (Exception, SystemExit):  # a module may need what is not installed
            continue
        if hasattr(found, "Model") and hasattr(found, "ModelArgs"):
            yield module


def runs(family: str) -> bool:
    """Return whether tests/tiny_families.py has settings of a small model of a family, which mlx-lm can run here."""
    if family in tiny_families.UNSUPPORTED:
        return True  # one of them ends the process when it runs
    module = tiny_families.module_of(family)
    try:
        model = module.Model(module.ModelArgs.from_dict(tiny_families.settings(family)))
        if sum(p.size for _, p in tree_flatten(model.parameters())) > MOST_PARAMETERS:
            return False
        mx.eval(model(mx.array([[1, 2, 3]])))
    except Exception:
        return False
    return True


def row(family: str, folder: Path) -> str | None:
    """Return the family's row of the table; None if it cannot be made."""
    if not runs(family):
        return None
    tiny_models.make(folder, family)
    config = EngineConfig(model=ModelConfig(path=str(folder), dtype="float32"), cache=CacheConfig(num_blocks=48))
    try:
        summary = summarise(config, check=True)
    except ModelError as e:
        return f"| `{family}` | refused | {e.message.partition('is not supported yet: ')[2] or e.message} |"
    groups = ", ".join(dict.fromkeys(CACHED[group.kind] for group in summary.groups))
    return (
        f"| `{family}` | {'served' if family in tiny_families.SERVED else 'served, checked at start only'} | {groups} |"
    )


def table() -> str:
    """Return the table and the list of families that were not tried."""
    rows, untried = [], []
    for family in families():
        with tempfile.TemporaryDirectory() as folder:
            found = row(family, Path(folder) / "model")
        if found is None:
            untried.append(f"`{family}`")
        else:
            rows.append(found)
    lines = ["| `model_type` | here | its layers cache, or why not |", "|---|---|---|", *rows]
    why = "Not tried, since their code needs a GPU of Apple's, or weights that are packed in a way of their own"
    return "\n".join(lines) + f"\n\n{why}: {', '.join(untried)}.\n"


def main() -> None:
    """Write the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
