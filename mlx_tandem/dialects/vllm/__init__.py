"""vLLM's own dialect, which tokenises texts and loads adapters."""
