"""The models in Ollama's form."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.ollama.bodies import ShowBody
from mlx_tandem.dialects.ollama.names import plain
from mlx_tandem.dialects.openai import models as openai
from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.generation.front import Front

VERSION = "0.12.6"
"""The version of Ollama whose API this is. Clients refuse to talk to older ones."""

NEVER = "9999-12-31T23:59:59Z"
"""The time at which a model leaves memory that is kept for good."""


def version(front: Front) -> dict[str, Any]:
    """Return the version of Ollama whose API this is."""
    return {"version": VERSION}


def tags(front: Front) -> dict[str, Any]:
    """Return all models that a request may name."""
    return {"models": [_listed(front, entry) for entry in openai.listing(front)["data"]]}


def running(front: ServerFront) -> dict[str, Any]:
    """Return the models that are in memory, with the time at which they leave it if nobody uses them until then."""
    if front.client.state == "idle":
        return {"models": []}
    info, left = front.client.info, front.idling.left
    leaves = NEVER if left == float("inf") else _at(time.time() + left)
    more = {"expires_at": leaves, "context_length": None if info is None else info.max_model_len}
    found = [_listed(front, entry) for entry in openai.listing(front)["data"] if entry["loaded"]]
    return {"models": [entry | more | {"size_vram": entry["size"]} for entry in found]}


def show(front: Front, body: ShowBody) -> dict[str, Any]:
    """Return the description of a model. Raises InvalidRequest and NotFound."""
    name = body.model or body.name
    if not name:
        raise InvalidRequest("model is required", param="model", code="missing_required_parameter")
    try:
        entry = openai.one(front, name)
    except NotFound:
        if plain(name) == name:
            raise
        entry = openai.one(front, plain(name))
    info, template = front.client.check_ready(), front.prompts.template
    kind = info.model_type
    described = {
        "general.architecture": kind,
        "general.parameter_count": info.parameters,
        f"{kind}.context_length": info.max_model_len,
        f"{kind}.block_count": info.layers,
        f"{kind}.vocab_size": info.vocab_size,
    }
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in sorted(front.defaults.items())),
        "template": template.source,
        "details": _details(front, entry),
        "model_info": described,
        "capabilities": _capabilities(front),
        "modified_at": _time(entry),
    }


def _listed(front: Front, entry: dict[str, Any]) -> dict[str, Any]:
    """Return Ollama's object for a model that OpenAI's dialect describes as `entry`."""
    info, models = front.client.info, front.models
    size = 0 if info is None else info.memory.weights
    digest = "" if info is None else front.fingerprints.of(None) or ""
    name = entry["id"]
    if name in models.registry and models.registry.is_read(name):
        own = models.registry.entry(name)
        size, digest = own.info.memory_bytes, own.ref.digest
    return {
        "name": name,
        "model": name,
        "modified_at": _time(entry),
        "size": size,
        "digest": digest,
        "details": _details(front, entry),
    }


def _details(front: Front, entry: dict[str, Any]) -> dict[str, Any]:
    """Return Ollama's object for a model's form."""
    info = front.client.info
    family = "" if info is None else info.model_type
    return {
        "parent_model": entry["parent"] or "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "" if info is None else _in_words(info.parameters),
        "quantization_level": "" if info is None else info.quantization or info.dtype,
    }


def _capabilities(front: Front) -> list[str]:
    """Return what the model can do, in Ollama's words."""
    found = ["completion"]
    if front.reading.can_call:
        found.append("tools")
    if front.reading.form is not None:
        found.append("thinking")
    return found


def _time(entry: dict[str, Any]) -> str:
    """Return the time at which a model was made."""
    return _at(entry["created"])


def _at(seconds: float) -> str:
    """Return the time so many seconds after 1970 as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _in_words(parameters: int) -> str:
    """Return a number of parameters in the form of Ollama, such as 8.0B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return str(parameters)
