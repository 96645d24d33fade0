"""Learning: what is trained on and how it is judged (host), and gradients on the served model (`device/`)."""
