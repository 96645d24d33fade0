"""HTTP: dialects over the engine client. `front` is free of the web framework; the rest is built on it."""
