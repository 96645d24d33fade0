from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_tandem import demo
from tests.fake_hub import fake_hub
from tests.seeds.workplace import MODELS, ROOT, Workplace


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("servers")
    for name, content in (("rust", "shout"), ("sql", "json"), ("support", "down"), ("medical", "shout")):
        shutil.copytree(demo.ADAPTER_PATHS[content], folder / "path" / "to" / f"{name}-adapter")
    for scripts in ("devtools", "scripts"):
        (folder / scripts).symlink_to(ROOT / scripts)
    (folder / "models").mkdir()
    (folder / "models" / "Llama-3-8B").symlink_to(demo.MODEL_PATH)
    (folder / "path" / "to" / "model").symlink_to(demo.MODEL_PATH)
    with fake_hub(dict.fromkeys(MODELS, demo.MODEL_PATH)) as hub:
        env = hub.environment(folder / "home", PYTHONPATH=str(ROOT))
        env |= {"XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
        yield Workplace(folder, hub, env)
