"""This project's own dialect for adapters and aliases."""
