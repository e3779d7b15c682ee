"""The child process's result: allocations and frees in order, and the operations that it computed."""
