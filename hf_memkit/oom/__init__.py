"""An out-of-memory message or log: its numbers, size or fragmentation, and what to change. Standard library only."""
