"""DeepSpeed: its presets with their sizes, and preparations before its engine starts."""
