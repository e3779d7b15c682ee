"""DeepSpeed: its presets, their sizes, and what must be prepared before its engine starts.

(A folder named `deepspeed` would shadow the library when tests run from the repository.)
"""
