"""The encoders of vision models, and the use of their embeddings in steps."""
