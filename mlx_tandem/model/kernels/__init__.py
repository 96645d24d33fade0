"""Source text of the kernels that MLX compiles for a GPU, and the dialect they are written in."""
