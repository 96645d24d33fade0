"""Predictions of what fits on a machine and how fast it should be: arithmetic over shapes and measured steps."""
