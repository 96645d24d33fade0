"""Grammars that the texts of requests must match: their compilation, their cache, and the masks made of them."""
