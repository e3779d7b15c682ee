"""DeepSpeed: its presets, their sizes, and what must be prepared before its engine starts."""
