"""Saving and evaluating."""

from __future__ import annotations

from collections.abc import Iterator

from hf_memkit.checks.rule import Found, deepspeed
from hf_memkit.checks.subject import Subject

_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
_OLD = "zero_optimization.stage3_gather_fp16_weights_on_model_save"


@deepspeed.warning(
    why="without it save_model() and checkpoints at stage 3 contain no model weights, only DeepSpeed's shards, which "
    "zero_to_fp32.py merges",
    fix='write "stage3_gather_16bit_weights_on_model_save": true',
    source="transformers 5.23.0: trainer.py 4113-4123; deepspeed 0.19.8: runtime/zero/config.py 257",
)
def no_weights_saved(subject: Subject) -> Iterator[Found]:
    names = (_GATHER, _GATHER.replace("stage3_", ""), _OLD)  # deepspeed takes all three
    if subject.zero.stage == 3 and not any(subject.at(name) is True for name in names):
        why = 'accelerate uses false for "auto": save_model() and checkpoints at stage 3 contain no model weights'
        yield Found(_GATHER, why=why if subject.at(_GATHER) == "auto" else "")


@deepspeed.error(
    why="under DeepSpeed Trainer rejects save_only_model together with load_best_model_at_end",
    fix="set one of the two to false",
    source="transformers 5.23.0: trainer.py 889-896",
)
def best_model_without_states(subject: Subject) -> Iterator[Found]:
    if subject.on("save_only_model") and subject.on("load_best_model_at_end"):
        yield Found("save_only_model", True, argument=True)


@deepspeed.error(
    why='below stage 3 Trainer cannot evaluate without training: "ZeRO inference only makes sense with ZeRO Stage 3"',
    fix="remove DeepSpeed for evaluation, or set the stage to 3",
    source="transformers 5.23.0: integrations/deepspeed.py 649",
)
def evaluation_only(subject: Subject) -> Iterator[Found]:
    asked = subject.on("do_eval") or subject.on("do_predict")
    if asked and subject.argument("do_train") is False and subject.zero.stage != 3:
        yield Found("do_train", False, argument=True)


@deepspeed.error(
    why="on a CPU the gathered weights share the swap buffers' memory: save_model() fails on shared tensors, or "
    "saves wrong weights",
    fix="train on a GPU, keep the parameters off NVMe, or use a recipe, which corrects this",
    source="deepspeed 0.19.8: runtime/engine.py 5675, `param.detach().cpu()`, which copies from a GPU only",
)
def gather_from_nvme_on_cpu(subject: Subject) -> Iterator[Found]:
    own_script = bool(subject.arguments_file)  # a recipe's run fixes it: hf_memkit/deepspeed/wiring.py
    on_cpu = subject.on("use_cpu")
    if own_script and on_cpu and subject.zero.swaps_parameters and subject.at(_GATHER) is True:
        yield Found(_GATHER, True)


@deepspeed.warning(
    why="with the optimizer on NVMe a resume silently loses Adam's moments and the master weights of biases and norms",
    fix="add the callback hf_memkit.deepspeed.nvme_resume.RestoreSwappedStates, which restores them; "
    "recipes include it",
    source="deepspeed 0.19.8: runtime/engine.py 4469-4482: it copies files that the new optimizer has no state for",
)
def resume_from_nvme(subject: Subject) -> Iterator[Found]:
    asked = subject.argument("resume_from_checkpoint")
    if asked and subject.zero.swaps_optimizer:
        yield Found("resume_from_checkpoint", asked, argument=True)
