"""Runs whose truth is known, generated and real, and how often the report's diagnosis is right about them."""
