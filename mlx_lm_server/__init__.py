"""So that `python -m mlx_lm_server` starts mlx-tandem."""
