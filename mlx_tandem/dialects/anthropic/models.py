"""The models in Anthropic's form."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from mlx_tandem.dialects.openai import models as openai
from mlx_tandem.generation.front import Front


def listing(front: Front) -> dict[str, Any]:
    """Return the list of all names that a request may give as its model, on one page."""
    data = [_described(entry) for entry in openai.listing(front)["data"]]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


def one(front: Front, model_id: str) -> dict[str, Any]:
    """Return one entry of the list, or one version of an adapter. Raises NotFound."""
    return _described(openai.one(front, model_id))


def _described(entry: dict[str, Any]) -> dict[str, Any]:
    """Return Anthropic's object for a model that OpenAI's dialect describes as `entry`."""
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": datetime.fromtimestamp(entry["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": entry["max_model_len"],
        "max_tokens": entry["max_model_len"],
    }
