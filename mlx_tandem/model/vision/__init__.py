"""Images: the encoders of vision models, and the way of their embeddings into a step."""
