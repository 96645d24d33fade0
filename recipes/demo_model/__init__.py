"""The recipe of the built-in demo model: data generator, training, evaluation, model card."""
