"""The benchmark of Jan's mlx-server, measured by `tandem bench serve`: 1 request at a time, then 2, 4 and 8 at once."""

from mlx_tandem.cli.programs import jan_benchmark

jan_benchmark()
