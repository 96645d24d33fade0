"""Source text of the GPU kernels that MLX compiles for this project, and the dialect they are written in."""
