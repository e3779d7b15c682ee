"""The rules, a module a subject. Importing this fills the registry, `hf_memkit.checks.RULES`.

In docs/checks.md the rules of a module stand below the first words of its docstring, up to a colon or a full stop.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
