"""What libraries do to a model before it trains: loading, quantising, adapters, DeepSpeed; without weights."""
