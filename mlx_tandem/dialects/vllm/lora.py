"""The handlers of vLLM's two routes that load and remove adapters."""

from __future__ import annotations

from mlx_tandem.dialects.vllm.bodies import LoadBody, UnloadBody
from mlx_tandem.errors import InvalidRequest, renamed
from mlx_tandem.generation.front import Front


async def load(front: Front, body: LoadBody) -> str:
    """Load an adapter. Like vLLM, refuse a name that is already loaded unless `load_inplace` asks to replace it."""
    models = front.models

    def check() -> None:
        if models.registry.is_read(body.lora_name) and not body.load_inplace:
            raise InvalidRequest(
                f"the LoRA adapter {body.lora_name!r} has already been loaded; set load_inplace to replace it",
                param="lora_name",
            )

    with renamed(name="lora_name", path="lora_path"):
        await models.load(body.lora_name, models.source(body.lora_name, body.lora_path), check=check)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


async def unload(front: Front, body: UnloadBody) -> str:
    """Remove an adapter and all its versions."""
    with renamed(name="lora_name"):
        await front.models.unload(body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."
