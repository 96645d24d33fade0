"""Images of requests: they are fetched, decoded, turned into arrays by the model's processor, and placed in prompts.

What decodes and processes an image runs in worker processes, which the kernel limits.
"""
