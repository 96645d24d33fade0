"""MLX ParaLLM's own routes."""
