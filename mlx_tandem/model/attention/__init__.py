"""Back ends of paged attention and the hook that sends a model's attention calls to them."""
