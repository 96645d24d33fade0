"""The device side of learning: gradients of adapters on the served model's own weights."""

# First of all, as in the package `model`: it has to stand before MLX is loaded.
from mlx_tandem.model import device as device
