"""Recipes: a model, data, the card it is made for, and its variants in order of preference; read, resolved and run."""
