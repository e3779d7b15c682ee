"""PyTorch's caching allocator, modelled: a trace replayed, and the smallest GPU on which it goes through."""
