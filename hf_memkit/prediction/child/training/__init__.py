"""Chooses and traces batches, steps and evaluations at `train()`, and collects facts for plans."""
