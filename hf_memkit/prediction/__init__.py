"""Predicts the memory of a training, by phase and category, before it runs.

```python
from hf_memkit import predict, preset

setup = preset("resident", model="gpt2-xl", gpu_memory="16GB", sequence_length=1024)
prediction = predict(setup)
print(prediction.verdict, prediction.peak_allocated_bytes, prediction.peak_module)
```

A real Trainer takes two optimizer steps on fake tensors in a child process (`child/`). Its allocations and frees
(`trace/`) are replayed through a model of PyTorch's caching allocator (`allocator/`), and compared with the GPU
(`catalog/fit.py`). One prediction goes through these classes:

| class | is |
|---|---|
| `ScriptJob` (`running_scripts.py`) | a script to predict, and the machine that it is for |
| `SetupJob` (`setup_as_script.py`) | a setup to predict, which memkit's own script trains on example rows |
| `ScriptRequest` (`trace/request.py`) | either of them, as sent to the child process |
| `TracedTraining` (`traced_training.py`) | what the child returns: the trace, and facts about the Trainer |
| `Prediction` (`prediction.py`) | bytes and the verdict |
| `ScriptPrediction` (`from_script.py`) | a script's `Prediction`, its `TracedTraining`, and needs of other batches |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_memkit.common.lazy_names import lazy_names

if TYPE_CHECKING:
    from hf_memkit.prediction.confidence import Confidence
    from hf_memkit.prediction.from_script import predict_script
    from hf_memkit.prediction.from_setup import predict
    from hf_memkit.prediction.from_trainer import predict_trainer
    from hf_memkit.prediction.prediction import Prediction

__all__ = ["Confidence", "Prediction", "predict", "predict_script", "predict_trainer"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Confidence": "confidence",
        "Prediction": "prediction",
        "predict": "from_setup",
        "predict_script": "from_script",
        "predict_trainer": "from_trainer",
    },
)
