"""Records what torch's operations make on fake tensors, and corrects those where a real GPU gives another result."""
