"""Everything that touches the device. The only package that imports MLX."""

# First of all: it puts a fast BLAS in front of MLX's own, which only works before MLX is loaded.
from mlx_tandem.model import device as device

# Before anything else imports mlx-lm.
from mlx_tandem.model import upstream as upstream  # isort: skip
