"""Routes by which trainers steer an inference server: pausing it, and publishing adapters to it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.training.bodies import NoBody
from mlx_tandem.dialects.vllm.bodies import LoadBody
from mlx_tandem.dialects.vllm.lora import load as load_once
from mlx_tandem.errors import InvalidRequest

NO_WEIGHTS = (
    "this server keeps the weights of its base model, and takes none over NCCL or from a folder of a whole model: save "
    'your adapter, and publish it with POST /load_lora_adapter {"lora_name": ..., "lora_path": ...}'
)
"""The answer to every request to change the base model."""

WEIGHT_ROUTES = (
    "/update_weights", "/init_broadcaster", "/init_weight_transfer_engine", "/start_weight_update",
    "/finish_weight_update", "/init_communicator/", "/update_named_param/", "/batch_update_named_params/",
    "/close_communicator/",
)  # fmt: skip
"""Routes of vLLM, prime-rl and TRL that change the weights of the base model."""


class PauseQuery(Struct, forbid_unknown_fields=True):
    """The way to pause: at once, or when all requests in flight have ended."""

    mode: Literal["keep", "wait"] = "keep"
    clear_cache: bool = False  # without effect: what is cached belongs to one version of one adapter
    wait_for_inflight_requests: bool = False  # the older name of `wait`


async def pause(front: ServerFront, query: PauseQuery, body: NoBody) -> dict[str, str]:
    """Let new requests wait until `resume`. Those in flight go on, under the version that they began with."""
    front.request_admission.pause()
    if query.mode == "wait" or query.wait_for_inflight_requests:
        await front.request_admission.idle()
    return {"status": "paused"}


def resume(front: ServerFront, body: NoBody) -> dict[str, str]:
    """Let the requests that waited and all later ones be answered."""
    front.request_admission.resume()
    return {"status": "resumed"}


def is_paused(front: ServerFront) -> dict[str, bool]:
    """Return whether new requests wait."""
    return {"is_paused": front.request_admission.is_paused}


async def load(front: ServerFront, body: LoadBody) -> dict[str, str]:
    """Load an adapter, or its next version if the name is known, as prime-rl expects of this route."""
    body.load_inplace = True
    await load_once(front, body)
    return {"status": "ok"}


def refuse_weights(front: ServerFront) -> None:
    """Raise InvalidRequest, which says how an adapter is published instead."""
    raise InvalidRequest(NO_WEIGHTS, code="weights_not_supported")


def world_size(front: ServerFront) -> dict[str, int]:
    """Return the number of processes that a trainer of TRL's would send weights to."""
    return {"world_size": 1}


def reset_prefix_cache(front: ServerFront, body: NoBody) -> dict[str, str]:
    """Do nothing: keys and values are cached for one version of one adapter, so no later version sees them."""
    return {"status": "ok"}
