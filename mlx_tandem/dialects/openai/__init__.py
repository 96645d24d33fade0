"""OpenAI's dialect: chats, text completions and models."""
