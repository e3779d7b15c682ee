"""Records memory and work of torch's operations on fake tensors, with corrections where a real GPU differs."""
