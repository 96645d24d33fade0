"""vLLM's own routes: tokenizing, and loading adapters."""
