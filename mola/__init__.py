"""The package behind `python -m mola.cli`, which starts mlx-tandem."""
