"""The layer between the engine and its callers, which turns requests into prompts and deltas into typed events.

It serves the HTTP dialects, the Python API and learning alike. It uses no arrays and no web framework.
"""
