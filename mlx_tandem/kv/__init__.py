"""Accounting of the KV cache: blocks, references, and who may share them. No arrays here."""
