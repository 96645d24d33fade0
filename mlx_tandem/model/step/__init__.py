"""What goes into a step beside the model, and what is drawn from it."""
