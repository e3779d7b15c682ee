"""The old name of `hf_memkit.components`, for what memkit 0.1 exported. The next release drops it."""

import importlib
import warnings

_components = importlib.import_module("hf_memkit.components")
warnings.warn(
    "hf_memkit.parts is now hf_memkit.components. Write the new name: the next release drops the old one",
    FutureWarning,
    stacklevel=2,
)
__path__ = list(_components.__path__)
