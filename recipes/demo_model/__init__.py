"""How the built-in demo model of mlx-tandem is made: data generator, training, evaluation, model card."""
