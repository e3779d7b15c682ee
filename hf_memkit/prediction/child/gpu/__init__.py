"""The fake GPU: answers to torch, libraries and scripts, and the choice of tensors that are fake."""
