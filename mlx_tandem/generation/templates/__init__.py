"""Chat templates: code of a model folder, rendered in worker processes. What a message says is no control token."""
