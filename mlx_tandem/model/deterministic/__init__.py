"""The arithmetic of `--deterministic`: what is computed for a token depends on the tokens before it and on nothing
else.
"""
