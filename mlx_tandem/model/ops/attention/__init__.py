"""Attention: kernels that read the KV pool, the cache that a layer sees, their checks, and whole attention blocks."""
