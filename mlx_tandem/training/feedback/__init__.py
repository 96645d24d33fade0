"""Feedback on completions: which are remembered, what people said of them, and how adapters learn from it."""
