"""Runs a script up to `train()`, without lasting files and without other trainings."""
