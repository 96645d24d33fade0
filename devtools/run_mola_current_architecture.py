"""MOLA's launcher: `start`, `stop` and `restart` are those of `mola`."""

from mlx_tandem.cli.programs import mola

mola()
