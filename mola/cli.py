"""`python -m mola.cli` is `tandem`, with the calls of MOLA."""

from mlx_tandem.cli.programs import mola as main

if __name__ == "__main__":
    main()
