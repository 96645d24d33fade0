"""What happens when MLX cannot compile for a CPU; tests/fault/test_start.py has the folders that it uses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_tandem.model import backend, compiler

pytestmark = pytest.mark.skipif(
    not backend.current().arithmetic.compiled_by_the_host or shutil.which("g++") is None,
    reason="nothing is compiled for a CPU here",
)
ERROR = RuntimeError("[Compile::eval_cpu] Failed to compile function x: y\nand more")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiler, "_failures", 0)
    yield
    mx.enable_compile()


def test_other_errors_are_none_of_its_business() -> None:
    assert not compiler.has_failed(RuntimeError("out of memory"))
    assert not compiler.has_failed(ValueError("a file"))


def test_after_a_failure_that_a_trial_does_not_confirm_compiling_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """As when two processes have written the same file."""
    for _ in range(compiler.MOST_FAILURES - 1):
        assert compiler.has_failed(ERROR)
    assert not caplog.records
    assert compiler.has_failed(ERROR)
    (said,) = caplog.messages
    assert said == (
        "fused operations are not compiled, which makes steps slower: "
        "[Compile::eval_cpu] Failed to compile function x: y"
    )


def test_after_a_failure_that_a_trial_confirms_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError):
        compiler._compile(33 / 32)  # trials use multiples of 1/16, which this process may have compiled already
    assert compiler.has_failed(ERROR)
    assert "No such file or directory" in caplog.text
    compiler._compile(33 / 32)
