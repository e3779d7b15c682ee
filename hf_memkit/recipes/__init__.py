"""Recipes: a model, data, the GPU it is made for, and its variants in order of preference; read, resolved and run."""
