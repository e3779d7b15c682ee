"""Ways to save memory, one file a family. Importing this registers them
(`hf_memkit.setup.techniques.registry.TECHNIQUES`).

A technique is a function `setup -> setup`: it puts its settings with their reasons, and its decorator says what it
saves, what it costs and when not to use it. What the finished setup needs is computed by
`hf_memkit.setup.techniques.setup_ledger`, from its settings.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
