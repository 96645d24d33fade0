"""What the codes of the engine's errors are for those that called it."""

from __future__ import annotations

import pytest

from mlx_tandem.engine.client.calls import error_of


@pytest.mark.parametrize("retryable", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_value", 400),
        ("invalid_adapter", 400),
        ("invalid_model_folder", 400),
        ("not_found", 404),
        ("adapter_not_found", 404),
        ("model_not_found", 404),
        ("trainer_not_found", 404),
        ("conflict", 409),
        ("adapter_changed", 409),
        ("too_large", 413),
        ("engine_error", 503),
        ("engine_died", 503),
        ("engine_unavailable", 503),
        ("grammar_too_complex", None),
        ("context_length_exceeded", None),
        ("invalid_image", None),
        ("numerical_error", None),
        ("step_failed", None),
    ],
)
def test_each_code_has_its_status(code: str, status: int | None, retryable: bool) -> None:
    """Codes that have none have it from whether the same may succeed another time."""
    error = error_of(code, "so it is", "model", retryable)
    assert (error.message, error.param, error.code) == ("so it is", "model", code)
    assert error.status == (status or (503 if retryable else 400))
