"""What happens at `train()`: which batches, evaluations and steps are traced, and what a plan has to know."""
