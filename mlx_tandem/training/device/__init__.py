"""The device side of learning: gradients of adapters on the served model's own weights."""

# This import comes first, as in the package `model`, since it has to run before MLX is loaded.
from mlx_tandem.model import device as device
