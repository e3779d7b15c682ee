"""What one published row computes, traced with today's libraries: the child of `plan_speed.py`.

    MEMKIT_PUBLISHED_ROWS=FILE python benchmarks/plan_speed_child.py FOLDER ID [ID ...]

Writes FOLDER/ID.json: `{"work"}` (`hf_memkit.prediction.trace.work.Work`, of the one step that counts), or
`{"error"}`. Rows that train are trained as `published_then.py` does it, but with the transformers that is installed.
Rows of forward and backward alone are done as NeuSight does it (sitar-lab/NeuSight@6945927: neusight/Tracing/trace.py,
`measure_e2e`): the plain model, a cross entropy beside it that is not timed, gradients that are added to those of the
run before. What Switch Transformers computes depends on values: each expert is given as many tokens as it takes at the
most, as the transformers of those rows did it, one expert after the other (4.38.1: models/switch_transformers/
modeling_switch_transformers.py, `SwitchTransformersSparseMLP`).
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import published_models as models
from benchmarks import published_then
from benchmarks.published_models import Row
from hf_memkit.prediction import wire
from hf_memkit.prediction.trace.work import Work

_PADDED: Final = 210
"""Tokens of a row of PEFT's table, whose length is not told: 840 real tokens in a batch of four, sorted by length."""


def main(folder: Path, names: list[str]) -> int:
    published_then.load_libraries()
    rows = models.read_rows(*os.environ[models.ROWS].split(os.pathsep))
    for name in names:  # each in a process of its own, which it changes
        child = os.fork()
        if child == 0:
            _case(rows[name], folder)
        os.waitpid(child, 0)
    return 0


def _case(row: Row, folder: Path) -> None:
    try:
        found = _traced(row)
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    path = folder / f"{row['id']}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


def _traced(row: Row) -> dict[str, Any]:
    from hf_memkit.catalog.hardware import described_machine

    gpu = described_machine(row["card"], None, None, None).gpu
    assert gpu is not None and gpu.capability is not None
    capability = int(gpu.capability), round(gpu.capability * 10) % 10
    if row["optimizer"].startswith("none"):
        return _forward_and_backward(row, capability, gpu.capacity_bytes)
    if row["seq_len"] is None:
        row = {**row, "seq_len": _PADDED, "padded": True}
    work = published_then.traced(row, capability, gpu.capacity_bytes, work=True).work
    return {"work": wire.dumps(_only(work, *work.steps()[-1]))}


def _forward_and_backward(row: Row, capability: tuple[int, int], capacity_bytes: int) -> dict[str, Any]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hf_memkit.prediction.child.gpu.attention import install_cuda_attention
    from hf_memkit.prediction.child.gpu.fake_gpu import patch_cuda_device, patch_fake_values, patch_module_apply
    from hf_memkit.prediction.child.tracer.kernel_rules import learn_use_counts
    from hf_memkit.prediction.child.tracer.tracer import StorageTracer

    patch_cuda_device(capability, capacity_bytes)
    install_cuda_attention(capability)
    patch_module_apply()
    patch_fake_values()
    learn_use_counts()
    torch.backends.cudnn.allow_tf32 = False
    tracer = StorageTracer("cuda", capability, work=True)
    assert tracer.recorder is not None
    work = tracer.recorder.work
    with FakeTensorMode(allow_non_fake_inputs=True), tracer:
        model = _model(row).to("cuda").train()
        ids = torch.ones(row["micro_batch"], row["seq_len"], dtype=torch.int64, device="cuda")
        # NeuSight hands over by position: tokens, mask, tokens of the decoder.
        inputs = [ids] * (3 if model.config.is_encoder_decoder else 1)
        begin = 0
        for _ in range(2):
            begin = len(work.calls)
            tracer.ended("data")
            result = model(*inputs)
            tracer.ended("forward")
            logits = result["prediction_logits"] if hasattr(result, "prediction_logits") else result["logits"]
            calls = len(work.calls)
            loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))
            del work.calls[calls:]
            del result, logits
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            tracer.ended("backward")
    return {"work": wire.dumps(_only(work, begin, len(work.calls)))}


def _only(work: Work, begin: int, end: int) -> Work:
    """These calls of it, and the operations that they call."""
    used = sorted(set(work.calls[begin:end]))
    number = {old: new for new, old in enumerate(used)}
    marks = [(min(at, end) - begin, phase) for at, phase in work.marks if at > begin]
    operations = [work.operations[each] for each in used]
    return Work(operations, [number[each] for each in work.calls[begin:end]], marks)


def _model(row: Row) -> Any:
    import transformers
    from transformers.initialization import no_init_weights

    config = models.transformers_config(row)
    kind = {"bert": "AutoModelForPreTraining", "switch_transformers": "AutoModelForSeq2SeqLM"}
    with no_init_weights():
        made_by = getattr(transformers, kind.get(config.model_type, "AutoModelForCausalLM"))
        model = made_by.from_config(config, attn_implementation="eager")
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersSparseMLP":
            module.forward = functools.partial(_with_full_experts, module)
    return model


def _with_full_experts(layer: Any, hidden_states: Any) -> Any:
    import torch

    _, probabilities, _ = layer.router(hidden_states)
    rows, tokens, width = hidden_states.shape
    flat = hidden_states.reshape(-1, width)
    result = flat.clone()
    for expert in layer.experts.values():
        taken = torch.ones(rows * min(tokens, layer.router.expert_capacity), dtype=torch.int64, device=flat.device)
        result[taken] = expert(flat[taken])
    return probabilities * result.view(rows, tokens, width)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), sys.argv[2:])
    os._exit(status)  # an ordinary exit runs destructors, which look for a GPU that does not exist
