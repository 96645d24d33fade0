"""Checks at start of every kernel that is not MLX's own: it is used only where it is right and not slower on this
device.
"""
