"""docs/migrating.md has a row for everything that the documents of the four other servers name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.seeds.extract import INVENTORY, extract, read

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
SECTIONS = {
    "MOLA": "From MOLA",
    "MLX ParaLLM": "From MLX ParaLLM",
    "mlx-lm-server": "From mlx-lm-server",
    "MLX Server": "From Jan's MLX Server",
}
FOUND: dict[str, dict[str, list[str]]] = json.loads(INVENTORY.read_text(encoding="utf-8"))


def rows(section: str) -> set[str]:
    """What stands in backticks in the first cells of a section's table."""
    (text,) = re.findall(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize(("server", "kind"), [(s, k) for s, kinds in FOUND.items() for k in kinds])
def test_everything_has_a_row(server: str, kind: str) -> None:
    assert set(FOUND[server][kind]) - rows(SECTIONS[server]) == set()


def test_the_extraction_sees_what_there_is() -> None:
    """A made-up page with one of each."""
    page = """
| `--new-flag` | int | and `-m, --model` |
GET /v1/things and curl -X POST http://localhost:8000/other/thing -d '{}'
| POST | `/v1/more` | x |
Exposes gauges for `one_gauge`, and `another`.
mlx_parallm_rl_something reads ./a/b/file_name.safetensors and $SOME_VARIABLE
```yaml
part:
  key: 1
```
"""
    assert extract(page) == {
        "flags": ["--model", "--new-flag", "-m"],
        "routes": ["/other/thing", "/v1/more", "/v1/things"],
        "metrics": ["another", "mlx_parallm_rl_something", "one_gauge"],
        "files": ["file_name.safetensors"],
        "variables": ["SOME_VARIABLE"],
        "keys": ["part.key"],
    }


@pytest.mark.skipif("TANDEM_DOCUMENTS" not in os.environ, reason="TANDEM_DOCUMENTS does not name the documents' folder")
def test_the_inventory_is_that_of_the_documents() -> None:
    assert read(Path(os.environ["TANDEM_DOCUMENTS"])) == FOUND
