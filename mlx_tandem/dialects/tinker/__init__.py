"""Tinker's dialect, by which its SDK trains adapters and samples from them."""
