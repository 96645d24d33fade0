"""This project's routes for adapters and aliases."""
