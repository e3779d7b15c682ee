"""Computes the time of a step from its operations and a GPU's rates, without torch."""
