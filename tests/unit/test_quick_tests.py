"""Which tests `make quick` runs."""

from __future__ import annotations

from pathlib import Path

from scripts.quick_tests import ALWAYS, concerned


def test_a_change_concerns_the_tests_of_its_package_and_changed_tests(tmp_path: Path) -> None:
    kernels = [f"tests/kernels/test_{name}.py" for name in ("lora", "sampling", "sampling_drafts")]
    others = ["tests/unit/kv/test_pool.py", "tests/unit/model/test_step.py", "tests/api/test_chat.py"]
    for name in ("tests/unit/test_files.py", *kernels, *others, ALWAYS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def found(*files: str) -> list[str]:
        return concerned(files, tmp_path)

    assert found() == found("README.md", "tests/serving.py", "mlx_tandem/demo/base/config.json") == [ALWAYS]
    assert found("mlx_tandem/kv/disk/cache.py", "mlx_tandem/kv/pool.py") == ["tests/unit/kv", ALWAYS]
    assert found("mlx_tandem/files.py", "mlx_tandem/types.py") == [ALWAYS, "tests/unit/test_files.py"]
    assert found("mlx_tandem/model/ops/sampling/draw.py") == [*kernels[1:], "tests/unit/model", ALWAYS]
    assert found("mlx_tandem/model/ops/lora.py") == [*kernels[:1], "tests/unit/model", ALWAYS]
    assert found("mlx_tandem/model/kernels/dialect.py") == ["tests/kernels", "tests/unit/model", ALWAYS]
    assert found("tests/api/test_chat.py", "tests/api/test_gone.py") == ["tests/api/test_chat.py", ALWAYS]
