"""`python -m mlx_lm_server` is `tandem serve`, with the calls of mlx-lm-server."""

from mlx_tandem.cli.programs import mlx_lm_server as main

if __name__ == "__main__":
    main()
