"""How long a step takes, from what it computes and a GPU's rates. Without torch."""
