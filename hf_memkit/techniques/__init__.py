"""Ways to save memory, one file a family.

A technique is a function `(setup, job) -> setup`: it puts its settings with their reasons, adds its terms to the
ledger, and says in its docstring what it saves, what it costs and when not to use it.
"""
