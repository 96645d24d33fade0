"""This project's own dialect for learning."""
