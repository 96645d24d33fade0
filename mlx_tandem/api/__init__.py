"""The Python API, which has the server's engine and rules and runs on threads of the caller's process."""

from mlx_tandem.api.conversations import Conversation
from mlx_tandem.api.engine import Engine
from mlx_tandem.api.generation import Completion
from mlx_tandem.api.trainer import Trainer

__all__ = ["Completion", "Conversation", "Engine", "Trainer"]
