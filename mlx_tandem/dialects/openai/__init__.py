"""OpenAI's chats, completions and models."""
