"""The names by which Ollama's clients ask for models."""

from __future__ import annotations

from mlx_tandem.errors import NotFound
from mlx_tandem.generation.adapters.model_names import Selection
from mlx_tandem.generation.front import Front

TAG = ":latest"
"""The tag that Ollama's clients append to names without one. No name here has a tag."""


def plain(name: str) -> str:
    """Return the name without the tag of the newest version."""
    return name.removesuffix(TAG)


async def select(front: Front, name: str | None) -> Selection:
    """Return the model that a name stands for, with or without TAG. None is a request without one. Raises NotFound."""
    try:
        return await front.models.select(name)
    except NotFound:
        if name is None or plain(name) == name:
            raise
        return await front.models.select(plain(name))
