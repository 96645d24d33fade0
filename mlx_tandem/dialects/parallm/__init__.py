"""MLX ParaLLM's own dialect."""
