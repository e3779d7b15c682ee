"""Recipes: a model, data, the target GPU, and variants in order of preference; read, resolved and run."""
