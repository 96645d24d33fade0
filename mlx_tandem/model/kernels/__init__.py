"""What the kernels of all rooms share: their dialect, checks and timing, writing in place, and order with the host."""
