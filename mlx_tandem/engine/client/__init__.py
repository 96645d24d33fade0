"""The front's end of the engine: the client, its connection, and the process that runs the engine.

The modules beside this package run in the engine process; those in it run in the front, on its event loop. Both sides
share the messages (`engine/messages.py`), their frames (`engine/wire.py`) and the data of learning
(`engine/learning.py`), and nothing else.
"""

from mlx_tandem.engine.client.engine_client import EngineClient
from mlx_tandem.engine.client.supervisor import State

__all__ = ["EngineClient", "State"]
