"""What fits on a machine and how fast it should be, as arithmetic over shapes, bandwidths and measured steps."""
