"""Measuring: device counters, phases, categories, modules, and records on disk."""
