"""The GPU that is not there: what torch, libraries and scripts ask of it, and which tensors are fake on it."""
