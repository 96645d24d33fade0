"""Anthropic's dialect: messages, their number of tokens, and models."""
