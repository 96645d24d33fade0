"""Sampling: kernels that draw tokens, the sampler that all rows share, masks of grammars, and accepted drafts."""
