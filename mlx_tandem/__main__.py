"""`python -m mlx_tandem` is the command `tandem`."""

from mlx_tandem.cli import main

if __name__ == "__main__":
    main()
