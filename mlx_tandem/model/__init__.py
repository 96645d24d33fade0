"""The device half of the engine: models, kernels, caches and the runner. Only this package and training/device
import MLX.
"""

# First of all: it puts a fast BLAS in front of MLX's own, which only works before MLX is loaded.
from mlx_tandem.model import device as device

# Before anything else imports mlx-lm.
from mlx_tandem.model import upstream as upstream  # isort: skip
