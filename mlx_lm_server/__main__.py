"""`python -m mlx_lm_server` runs `tandem serve` with mlx-lm-server's command lines."""

from mlx_tandem.cli.programs import mlx_lm_server as main

if __name__ == "__main__":
    main()
