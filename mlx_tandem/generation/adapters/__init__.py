"""The models that requests can name: the base, adapters with their versions, and aliases.

`model_names.Models` is the entry. It uses the front's registry (`mlx_tandem/adapters/`), asks the engine's client to
read folders, and checks names, folders and quotas by the rules of the other modules here.
"""
