"""Saving, reading and merging checkpoints: only advice."""

from __future__ import annotations

from hf_memkit.setup.techniques.registry import advice

_SAVE = {"save": 1, "resume": 2, "after": 3, "host/save": 1, "host/after": 2}

advice(
    "zero3-shards", "checkpoints",
    {"deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save": False},
    saves="at stage 3 a save gathers the 16-bit weights of the whole model",
    costs="checkpoints then hold DeepSpeed shards; zero_to_fp32.py in the checkpoint folder merges them",
    offered=_SAVE,
)  # fmt: skip
advice(
    "fsdp-shards", "checkpoints", {"arguments.fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    saves="each rank then writes its own shards, and none gathers the whole model. Code that gathers a full "
    "state dict itself needs StateDictOptions(full_state_dict=True, cpu_offload=True), with version 1 "
    "FullStateDictConfig(offload_to_cpu=True, rank0_only=True), and RAM for the whole model",
    costs="save_model() writes no weights; `accelerate merge-weights` merges the shards of a checkpoint later",
    offered=_SAVE,
)  # fmt: skip
advice(
    "save-only-model", "checkpoints", {"arguments.save_only_model": True},
    saves="a save then gathers no optimizer states",
    costs="training cannot resume from the checkpoint; DeepSpeed refuses load_best_model_at_end, and FSDP "
    "SHARDED_STATE_DICT",
    offered={"save": 2, "host/save": 2, "disk/save": 2, "disk/anything": 2},
)  # fmt: skip
advice(
    "fewer-checkpoints", "checkpoints", {"arguments.save_total_limit": 1},
    saves="the Trainer then deletes older checkpoints (with load_best_model_at_end it keeps the best one too)",
    costs="no way back to them",
    offered={"disk/save": 1, "disk/anything": 1},
)  # fmt: skip
advice(
    "fresh-optimizer", "checkpoints", {"model.from_pretrained": "CHECKPOINT, without resume_from_checkpoint"},
    saves="Trainer loads the optimizer's states, 8 bytes a parameter for AdamW, into RAM, or onto each GPU where "
    "there are several processes (transformers 5.23: trainer.py 3964); a new training from the checkpoint's weights "
    "loads none. With resume_from_checkpoint keep optim, which alone can load these states",
    costs="moments, learning rate schedule and the position in the data begin anew",
    offered={"resume": 3, "host/resume": 2, "else": 2},
)  # fmt: skip
advice(
    "best-model-later", "checkpoints", {"arguments.load_best_model_at_end": False},
    saves="after training, the GPU still holds optimizer and gradients; trainer.state.best_model_checkpoint names the "
    "folder, which from_pretrained reads in a new process",
    costs="the Trainer keeps the last weights, and save_total_limit no longer spares the best checkpoint",
    offered={"best_model": 1, "host/best_model": 1},
)  # fmt: skip
advice(
    "new-process", "checkpoints", {"model.from_pretrained": "CHECKPOINT, in a new process"},
    saves="training had ended, and its process still holds optimizer, gradients and data; save, merge or evaluate in "
    "a second script, which reads the last checkpoint",
    costs="another script; the job must save a checkpoint at its last step",
    offered={"after": 1, "host/after": 1},
)  # fmt: skip
advice(
    "merge-later", "checkpoints", {"model.merge_and_unload": "in RAM, after training"},
    saves="the GPU also holds optimizer and gradients. Save the adapters alone (trainer.save_model), then load the "
    "base model with device_map='cpu' in a new process and merge there",
    costs="RAM for the whole model, and minutes",
    offered={"merge": 1},
)  # fmt: skip
