"""The tree of errors: what each is over HTTP, and what is changed on the way to a client."""

from __future__ import annotations

import pytest

from mlx_tandem import errors
from mlx_tandem.errors import InvalidRequest, Overloaded, TandemError, renamed

TABLE = [
    (errors.TandemError, 500, "server_error", "internal_error", None),
    (errors.InvalidRequest, 400, "invalid_request_error", "invalid_value", None),
    (errors.NotFound, 404, "invalid_request_error", "not_found", None),
    (errors.Conflict, 409, "invalid_request_error", "conflict", None),
    (errors.TooLarge, 413, "invalid_request_error", "too_large", None),
    (errors.UnsupportedMedia, 415, "invalid_request_error", "unsupported_media_type", None),
    (errors.Unauthorized, 401, "authentication_error", "invalid_api_key", None),
    (errors.Forbidden, 403, "permission_error", "forbidden", None),
    (errors.QuotaExceeded, 507, "insufficient_quota", "adapter_quota_exceeded", None),
    (errors.Timeout, 504, "timeout_error", "request_timeout", None),
    (errors.ReceiveTimeout, 408, "timeout_error", "request_timeout", None),
    (errors.EngineError, 503, "server_error", "engine_error", 1.0),
    (errors.EngineUnavailable, 503, "server_error", "engine_unavailable", 5.0),
    (errors.GroupFailed, 503, "server_error", "group_failed", 5.0),
    (errors.EngineDied, 503, "server_error", "engine_died", 5.0),
    (errors.ModelError, 400, "invalid_request_error", "invalid_model_folder", None),
]


@pytest.mark.parametrize(("kind", "status", "type", "code", "retry_after"), TABLE)
def test_what_an_error_is_over_http(
    kind: type[TandemError], status: int, type: str, code: str, retry_after: float | None
) -> None:
    made = kind("it is wrong")
    assert (made.status, made.type, made.code, made.retry_after) == (status, type, code, retry_after)
    assert (made.message, made.param, str(made)) == ("it is wrong", None, "it is wrong")
    assert kind("x", code="not_found", param="p").code == "not_found"
    assert kind("x").code == code, "the class keeps its own"


def test_the_table_has_every_error() -> None:
    there = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TandemError)}
    assert there == {row[0] for row in TABLE} | {Overloaded, errors.ContextOverflow}


@pytest.mark.parametrize(("wait", "told"), [(-5.0, 1.0), (0.0, 1.0), (7.5, 7.5), (120.0, 120.0), (1e9, 120.0)])
def test_a_refusal_says_when_to_come_again(wait: float, told: float) -> None:
    made = Overloaded("full", retry_after=wait)
    assert (made.status, made.type, made.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert made.retry_after == told
    full = Overloaded("full", retry_after=wait, status=503, code="memory_pressure")
    assert (full.status, full.type, full.code, full.retry_after) == (503, "server_error", "memory_pressure", told)


def test_fields_are_renamed_and_others_are_left() -> None:
    for param, shown in (("inner", "outer"), ("other", "other"), (None, None)):
        with pytest.raises(InvalidRequest) as raised, renamed(inner="outer"):
            raise InvalidRequest("it is wrong", param=param)
        assert (raised.value.param, raised.value.message) == (shown, "it is wrong")
    with pytest.raises(ValueError, match="other"), renamed(inner="outer"):
        raise ValueError("other")


@pytest.mark.parametrize(
    ("message", "param", "named"),
    [
        ("it is wrong", None, "it is wrong"),
        ("it is wrong", "a.b", "a.b: it is wrong"),
        ("a.b is wrong", "a.b", "a.b is wrong"),
        ("the field a.b is wrong", "a.b", "the field a.b is wrong"),
    ],
)
def test_a_message_for_clients_that_get_no_field(message: str, param: str | None, named: str) -> None:
    assert InvalidRequest(message, param=param).named == named
