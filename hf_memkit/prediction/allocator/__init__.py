"""Model of PyTorch's caching allocator: replays a trace and finds the smallest GPU on which it completes."""
