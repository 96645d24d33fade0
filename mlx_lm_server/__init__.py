"""The package behind `python -m mlx_lm_server`, which starts mlx-tandem."""
