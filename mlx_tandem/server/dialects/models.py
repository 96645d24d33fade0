"""`/v1/models`: everything that a request may name as its model."""

from __future__ import annotations

from typing import Any

from mlx_tandem.server.front import Front
from mlx_tandem.server.models import BASE


def listing(front: Front) -> dict[str, Any]:
    models = front.models
    names = [models.id, *models.served_names]
    names += [e.name for e in models.registry.entries()]
    names += [name for name, _ in models.registry.unread()]
    names += [name for name, _ in models.aliases.items()]
    return {"object": "list", "data": [_describe(front, name) for name in names]}


def one(front: Front, selector: str) -> dict[str, Any]:
    """NotFound (`model_not_found`) when nothing is called so. Nothing is read from disk for it."""
    models = front.models
    if selector not in models.base_names and selector not in models.aliases and selector not in models.registry:
        models.registry.entry(selector)  # a version, or NotFound
    return _describe(front, selector)


def _describe(front: Front, name: str) -> dict[str, Any]:
    """`root`: the version or the model behind the name; `parent`: the base that it stands on."""
    models, info = front.models, front.client.info
    created, root = front.started, name
    parent: str | None = models.id
    if name in models.base_names:
        root, parent = models.id, None
    elif name not in models.aliases and (name not in models.registry or models.registry.is_read(name)):
        entry = models.registry.entry(name)
        created, root = entry.created, entry.ref.label
    return {
        "id": models.id if name == BASE else name,
        "object": "model",
        "created": int(created),
        "owned_by": "mlx-tandem",
        "root": root,
        "parent": parent,
        "max_model_len": info.max_model_len if info is not None else None,
    }
