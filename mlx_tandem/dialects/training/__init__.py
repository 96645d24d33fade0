"""This project's routes for learning."""
