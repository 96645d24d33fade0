"""The list of all names that a request may give as its model."""

from __future__ import annotations

import contextlib
from typing import Any

from mlx_tandem.errors import NotFound
from mlx_tandem.generation.front import Front
from mlx_tandem.limits import BASE_NAMES


def listing(front: Front) -> dict[str, Any]:
    """Return the list of all names that a request may give as its model."""
    models = front.models
    names = [models.id, *models.served_names]
    names += [e.name for e in models.registry.entries()]
    names += [name for name, _ in models.registry.unread()]
    names += [name for name, _ in models.aliases.items()]
    return {"object": "list", "data": [_describe(front, name) for name in names]}


def one(front: Front, model_id: str) -> dict[str, Any]:
    """Return one entry of the list, or one version of an adapter, without reading an adapter for it.

    Raises NotFound (`model_not_found`) when nothing has this name.
    """
    try:
        return _describe(front, model_id)
    except NotFound as e:
        raise front.models.unknown(model_id, e) from None


def _describe(front: Front, name: str) -> dict[str, Any]:
    """Return one entry of the list.

    `root` is the version or model behind the name, and `parent` the base of an adapter or alias. `loaded` tells whether
    the model can answer without reading its folder first; `status` tells the same in more detail.
    """
    models, info = front.models, front.client.info
    status = models.status(name)
    created, root = front.started, name
    parent: str | None = models.id
    if name in models.base_names:
        root, parent = models.id, None
    elif name not in models.aliases:
        with contextlib.suppress(NotFound):  # Its folder was not read yet.
            entry = models.registry.entry(name)
            created, root = entry.created, entry.ref.label
    return {
        "id": models.id if name in BASE_NAMES else name,
        "object": "model",
        "created": int(created),
        "owned_by": "mlx-tandem",
        "root": root,
        "parent": parent,
        "loaded": status == "loaded",
        "status": status,
        "max_model_len": info.max_model_len if info is not None else None,
    }
