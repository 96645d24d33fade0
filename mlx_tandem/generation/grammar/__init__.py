"""Structured output: what the text of an answer must match, checked before anything is computed."""
