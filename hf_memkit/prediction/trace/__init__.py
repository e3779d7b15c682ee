"""What comes back from the child process: storages in the order in which they come and go, and what was computed."""
