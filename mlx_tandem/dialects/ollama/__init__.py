"""Ollama's dialect: chats, completions and models."""
