"""Library code that prepares a model for training, run without weights: loading, quantising, adapters, DeepSpeed."""
