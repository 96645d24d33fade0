"""The Python API: the same engine and the same rules as the server, on threads of the caller's process."""

from mlx_tandem.api.engine import Completion, Engine
from mlx_tandem.api.trainer import Trainer

__all__ = ["Completion", "Engine", "Trainer"]
