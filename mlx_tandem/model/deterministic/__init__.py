"""The arithmetic of `--deterministic`: the bits that are computed for a token depend only on the model, the adapter and
the tokens before it.
"""
