"""MLX ParaLLM's server and learning loop in one object, for Python; mlx-tandem does the work."""

from mlx_parallm.integrated import LoRAConfig, RLConfig, RLIntegratedServer

__all__ = ["LoRAConfig", "RLConfig", "RLIntegratedServer"]
