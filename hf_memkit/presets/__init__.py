"""Presets: named sets of techniques, resolved for a model and a GPU.

```python
from hf_memkit import preset

setup = preset("8bit", model="gpt2-xl", gpu_memory="16GB", global_batch_size=32)
trainer = setup.trainer(output_dir="out", train_dataset=data)
```
"""

from hf_memkit.presets.compose import apply_preset, compose
from hf_memkit.presets.named import PRESETS
from hf_memkit.presets.preset_setup import PresetSetup

__all__ = ["PRESETS", "PresetSetup", "apply_preset", "compose"]
