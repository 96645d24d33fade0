"""This project's own dialect for feedback on completions."""
