"""A script, run up to `train()`, that leaves nothing behind and starts no other training."""
