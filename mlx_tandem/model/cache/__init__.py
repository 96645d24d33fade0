"""Caches of layers on the device: formats, the arrays of all pools, and the states of recurrent layers."""
