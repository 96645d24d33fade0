"""The short benchmark of Jan's mlx-server, measured by `tandem bench serve`: one round of the same requests."""

from mlx_tandem.cli.programs import jan_benchmark

jan_benchmark("--repeats", "1")
