"""MOLA's step of the installation, which has nothing to do here."""

print("nothing to do: mlx-tandem runs mlx-lm's model modules as they are, without a patch")
