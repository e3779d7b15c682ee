"""The old name of `hf_memkit.components`, for what memkit 0.1 exported. The next release drops it."""

import importlib
import warnings

_components = importlib.import_module("hf_memkit.components")
warnings.warn(
    "hf_memkit.parts is now hf_memkit.components; write the new name, the old one goes in the next release",
    FutureWarning,
    stacklevel=2,
)
__path__ = list(_components.__path__)
