"""The JSON bodies of Tinker's API.

A newer SDK may send a field that this server does not know. It is refused by its name, unless its value asks for
nothing: null, false, zero, or something empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A number that a client counts."""

Large = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""The number of a request to a sampler."""

Id = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=1024)]


def known(kind: type[Struct]) -> Callable[[Any], Any]:
    """Return a function that leaves out of a decoded body what `kind` does not know and what asks for nothing."""
    hints = get_type_hints(kind)
    kinds = {name: [own for own in (hint, *get_args(hint)) if isinstance(own, type)] for name, hint in hints.items()}
    inner = {name: own for name, found in kinds.items() for own in found if issubclass(own, Struct)}

    def prepared(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {name: own for name, own in value.items() if name in hints or own not in (None, False, 0, "", [], {})}
        return {name: known(inner[name])(own) if name in inner else own for name, own in kept.items()}

    return prepared


class Empty(Struct):
    """A body whose fields mean nothing here."""


class SessionBody(Struct, forbid_unknown_fields=True):
    """The body of a request for a session."""

    tags: list[Text] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: Text | None = None
    project_id: Text | None = None
    display_name: Text | None = None
    type: str = ""


class HeartbeatBody(Struct, forbid_unknown_fields=True):
    """The body of a sign of life."""

    session_id: Id
    type: str = ""


class Reason(Struct):
    """The reason why a session has finished."""

    type: str = ""


class FinishBody(Struct, forbid_unknown_fields=True):
    """The body of a request that ends a session."""

    reason: Reason | None = None
    detail: str | None = None
    type: str = ""


class LoraBody(Struct, forbid_unknown_fields=True):
    """The shape of a new adapter."""

    rank: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(Struct):
    """The family of an optimizer, with settings of its own."""

    type: str = "adamw"


class ModelBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for a model to train."""

    session_id: Id
    model_seq_id: Number
    base_model: Id
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody | None = None
    type: str = ""


class ModelIdBody(Struct, forbid_unknown_fields=True):
    """The body of a request about a model."""

    model_id: Id
    type: str = ""


class AdamBody(Struct, forbid_unknown_fields=True):
    """The parameters of AdamW. The ranges are in limits.py."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class StepBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for a step of the optimizer."""

    model_id: Id
    seq_id: Number | None = None
    adam_params: AdamBody | None = None
    optimizer_params: OptimizerBody | None = None
    type: str = ""


class SaveBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request to save a checkpoint from which training goes on."""

    model_id: Id
    path: Id | None = None
    seq_id: Number | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str = ""


class SaveSamplerBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request to save weights to sample from; without a path they get a sampler and no name."""

    model_id: Id
    path: Id | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: Number | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: str = ""


class LoadBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request to load a checkpoint: onto a model, or as a new model of a session."""

    path: Id
    optimizer: bool
    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: Id | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None
    type: str = ""


class SamplerBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for a sampling session."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Id | None = None
    model_path: Id | None = None
    type: str = ""


class JoinBody(Struct, forbid_unknown_fields=True):
    """The body of a request for a number among the clients of a sampling session."""

    sampling_session_id: Id
    type: str = ""


class PromptBody(Struct, forbid_unknown_fields=True):
    """A prompt in chunks, of which only those of token ids are served."""

    chunks: list[dict[str, Any]]


class SamplingBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters by which tokens are drawn. The ranges are in limits.py."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: Any = None  # null: the end of the model's texts; a text, texts or token ids besides; []: nothing ends it
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request to a sampler."""

    sampling_session_id: Id | None = None
    seq_id: Large | None = None
    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    base_model: Id | None = None
    model_path: Id | None = None
    type: str = ""


class RetrieveBody(Struct, forbid_unknown_fields=True):
    """The body of a request for a result."""

    request_id: Id
    allow_metadata_only: bool = False
    model_id: Id | None = None
    type: str = ""


class TargetBody(Struct, forbid_unknown_fields=True):
    """The requests that a client wants to know about: its own to a sampling session."""

    sampling_session_id: Id
    cloned_sampler_id: Large = 0
    type: str = "sampling_session"


class RetrieveManyBody(Struct, forbid_unknown_fields=True):
    """The body of a request for what is done of the requests to a sampling session."""

    target: TargetBody
    prev_cursor: Large = 0
    timeout: float | None = None
    retrieved_request_ids: Annotated[list[Id], Meta(max_length=65_536)] = []


class CancelBody(Struct, forbid_unknown_fields=True):
    """The body of a request to cancel another one."""

    request_id: Id
    type: str = ""


class PathBody(Struct, forbid_unknown_fields=True):
    """The body of a request about a checkpoint."""

    tinker_path: Id
    weights_access_token: str | None = None


class ExpiryBody(Struct, forbid_unknown_fields=True):
    """The body of a request to change when a checkpoint expires; null: never."""

    ttl_seconds: int | None = None


class PageQuery(Struct):
    """The range of a list's entries that is wanted."""

    limit: Annotated[int, Meta(ge=0, le=1000)] = 20
    offset: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


digest = msgspec.msgpack.Encoder(order="deterministic").encode
"""Return the bytes of a body, which are equal for equal bodies."""
