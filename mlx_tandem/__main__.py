"""`python -m mlx_tandem` runs the command `tandem`."""

from mlx_tandem.cli import main

if __name__ == "__main__":
    main()
