"""So that `python -m mola.cli` starts mlx-tandem."""
