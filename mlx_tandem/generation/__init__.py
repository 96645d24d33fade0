"""Between the engine and the dialects: prompts in, typed events out, for every way in. No arrays, no web framework."""
