"""MOLA's benchmark, measured by `tandem bench serve`."""

from mlx_tandem.cli.programs import mola_benchmark

mola_benchmark()
