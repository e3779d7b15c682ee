"""Setup → a training job that its owner can read and change, and that needs memkit for its callback only."""

from hf_memkit.recipes.export.files import export_script, start_command

__all__ = ["export_script", "start_command"]
