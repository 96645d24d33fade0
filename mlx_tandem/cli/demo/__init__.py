"""`tandem demo`: shows the built-in model at work."""
