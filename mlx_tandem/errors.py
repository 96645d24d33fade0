"""All errors in one tree. Each class has its HTTP status and OpenAI's `type` and `code`; layers below HTTP only
raise.

TandemError
├── InvalidRequest      400  a field is wrong; `param` names it
│   ├── ContextOverflow 400  the prompt, or the prompt with its answer, has more tokens than fit
│   ├── NotFound        404  a model, adapter or route does not exist
│   ├── Conflict        409  the thing exists already or is in use
│   └── TooLarge        413  the body or the prompt is over its limit
├── UnsupportedMedia    415  the body is not plain JSON
├── Unauthorized        401  the API key is missing or wrong
├── Forbidden           403  the Host header names another server, or the key may not do this
├── Overloaded          429  admission is refused, or 503; `retry_after` says for how many seconds
├── QuotaExceeded       507  clients would keep more than the settings allow
├── Timeout             504  the answer took too long
│   └── ReceiveTimeout  408  the client took too long to send the request
└── EngineError         503  a step, the engine or the device failed; the request can be sent again
    ├── EngineUnavailable    the engine is not ready yet, restarting or draining
    ├── GroupFailed          one of several ranks that compute the model has died, hangs or disagrees
    └── EngineDied           the engine's process ended during the request
ModelError                   a model or adapter folder cannot be loaded
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlx_tandem.printable import printable

MOST_PARAM = 300
"""Most characters of the name of a field."""

CODES = frozenset(
    """
    adapter_changed adapter_not_found adapter_quota_exceeded alias_not_found alias_quota_exceeded batch_not_found
    batch_quota_exceeded checkpoint_damaged checkpoint_exists checkpoint_not_found completion_not_found conflict
    context_length_exceeded conversation_changed engine_died engine_error engine_unavailable file_not_found
    first_token_timeout folder_in_use forbidden foreign_folder grammar_too_complex group_failed host_not_allowed
    internal_error invalid_adapter invalid_api_key invalid_image invalid_json invalid_model_folder invalid_request
    invalid_type invalid_value job_not_found learning_disabled memory_pressure method_not_allowed missing_extra
    missing_required_parameter missing_scope model_not_found no_paths not_found numerical_error rate_limit_exceeded
    request_timeout step_failed storage_error store_damaged too_large trainer_not_found trajectory_closed
    trajectory_not_found unknown_format unknown_parameter unsupported_media_type unsupported_parameter
    version_not_found weights_not_supported
    """.split()
)
"""Every `code` of an error. Metrics have these as a label and count any other code as `other`."""


class TandemError(Exception):
    """Base of every error that this project raises on purpose. Its message is safe to show to a client.

    `message` and `param` may repeat text from files and clients: what is assigned to them is escaped and cut.
    """

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    retry_after: float | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__()
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    @property
    def message(self) -> str:
        """The sentence that says what is wrong."""
        return self._message

    @message.setter
    def message(self, text: str) -> None:
        self._message = printable(text)

    @property
    def param(self) -> str | None:
        """The field that is wrong; None if the error is about none."""
        return self._param

    @param.setter
    def param(self, text: str | None) -> None:
        self._param = None if text is None else printable(text, MOST_PARAM)

    @property
    def named(self) -> str:
        """The message for clients that get no `param`: it begins with the field's name unless it names it already."""
        return self.message if self.param is None or self.param in self.message else f"{self.param}: {self.message}"

    def __str__(self) -> str:
        return self.message


class InvalidRequest(TandemError):
    """A field of the request is wrong; `param` names it."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextOverflow(InvalidRequest):
    """The prompt, or the prompt with the answer that was asked for, has more tokens than fit.

    The message begins with OpenAI's words, which clients look for. `prompt` has the number of the prompt's tokens, and
    `most` how many tokens a prompt may have.
    """

    code = "context_length_exceeded"

    def __init__(self, prompt: int, most: int, room: int, *, param: str):
        """Say that a prompt of `prompt` tokens is over `most`. `room` is the length of the context."""
        super().__init__(
            f"This model's maximum context length is {room} tokens. However, your prompt resulted in {prompt} tokens, "
            f"and {most} are allowed. Please reduce the length of the messages.",
            param=param,
        )
        self.prompt = prompt
        self.most = most


class NotFound(InvalidRequest):
    """A model, adapter, route or the like does not exist."""

    status = 404
    code = "not_found"


class Conflict(InvalidRequest):
    """The thing exists already or is in use."""

    status = 409
    code = "conflict"


class TooLarge(InvalidRequest):
    """The body or the prompt is over its limit."""

    status = 413
    code = "too_large"


class UnsupportedMedia(TandemError):
    """The body is not plain JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Unauthorized(TandemError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(TandemError):
    """The Host header or the origin is not one that this server accepts, or the key may not do what was asked."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class Overloaded(TandemError):
    """A request was refused at admission; `retry_after` is the estimated wait in seconds, from 1 to 120."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float, status: int = 429, code: str | None = None):
        super().__init__(message, code=code)
        self.status = status
        if status == 503:
            self.type = "server_error"
        self.retry_after = min(max(retry_after, 1.0), 120.0)


class QuotaExceeded(TandemError):
    """Clients would keep more than the settings allow; something has to be removed first."""

    status = 507
    type = "insufficient_quota"
    code = "adapter_quota_exceeded"


class Timeout(TandemError):
    """A time limit of the server has passed; what was begun is cancelled."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"


class ReceiveTimeout(Timeout):
    """The client did not send its request in time."""

    status = 408


class EngineError(TandemError):
    """A step, the engine or the device failed; the request can be sent again."""

    status = 503
    type = "server_error"
    code = "engine_error"
    retry_after = 1.0


class EngineUnavailable(EngineError):
    """The engine is not ready yet, restarting or draining."""

    code = "engine_unavailable"
    retry_after = 5.0


class EngineDied(EngineError):
    """The engine's process ended during the request."""

    code = "engine_died"
    retry_after = 5.0


class GroupFailed(EngineError):
    """One of several ranks that compute the model together has died, hangs, or has drawn other tokens."""

    code = "group_failed"
    retry_after = 5.0


class ModelError(InvalidRequest):
    """A model or adapter folder cannot be used; the message names the file or the field."""

    code = "invalid_model_folder"


@contextmanager
def renamed(**fields: str) -> Iterator[None]:
    """Rename the field of an error raised inside the block: `fields` maps inner names to the caller's names."""
    try:
        yield
    except TandemError as e:
        e.param = fields.get(e.param or "", e.param)
        raise
