"""`python -m mola.cli` runs `tandem` with MOLA's command lines."""

from mlx_tandem.cli.programs import mola as main

if __name__ == "__main__":
    main()
