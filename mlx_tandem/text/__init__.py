"""Text in, token ids out, and back: tokenizer, chat template, stop strings. No arrays, no web framework."""
