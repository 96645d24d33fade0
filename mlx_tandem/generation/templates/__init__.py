"""Chat templates, which are code from a model folder and are rendered in worker processes.

The text of a message never becomes a control token.
"""
