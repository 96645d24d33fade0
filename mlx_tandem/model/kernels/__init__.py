"""Shared parts of all rooms' kernels: their dialect, checks and timing, writing in place, and order with the host."""
