"""The operations of a model, each in one room: kernel text, reference, check, choice at start, use by modules."""
