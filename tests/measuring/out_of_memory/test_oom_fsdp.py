"""FSDP: what its tracebacks show, and advice that works under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hf_memkit.measuring.out_of_memory.advice import suggest
from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob
from hf_memkit.measuring.out_of_memory.messages import parse_message
from hf_memkit.measuring.out_of_memory.run_view import RunView
from hf_memkit.measuring.out_of_memory.traceback import trace
from tests.measuring.out_of_memory.test_oom_advice import TOP, explanation_of, frame, gpu, keys

FSDP = "torch/distributed/fsdp/_fully_shard"
FORWARD = TOP + frame("transformers/trainer.py", "training_step", "loss = self.compute_loss(model, inputs)")
BACKWARD = TOP + frame("accelerate/accelerator.py", "backward", "loss.backward(**kwargs)")
GATHER = frame(f"{FSDP}/_fsdp_param_group.py", "unshard") + frame(f"{FSDP}/_fsdp_collectives.py", "foreach_all_gather")
COPY_OUT = frame(f"{FSDP}/_fsdp_param.py", "init_all_gather_outputs", "torch.empty(size, device=device)")
REDUCE = frame(f"{FSDP}/_fsdp_collectives.py", "foreach_reduce", "reduce_scatter_input = comm.allocate(")
STATES = (
    TOP
    + frame("accelerate/optimizer.py", "step", "self.optimizer.step(closure)")
    + frame("torch/optim/adam.py", "_init_group", 'state["exp_avg_sq"] = torch.zeros_like(')
    + frame("torch/distributed/tensor/_dispatch.py", "dispatch", "local_results = op_call(*args)")
)
SAVE = (
    TOP
    + frame("transformers/trainer.py", "save_model", "state_dict = self.accelerator.get_state_dict(self.model)")
    + frame("torch/distributed/checkpoint/state_dict.py", "get_model_state_dict")
    + frame("torch/distributed/tensor/_api.py", "full_tensor")
)
PREPARE = (
    TOP
    + frame("accelerate/accelerator.py", "prepare", "result = self._prepare_fsdp2(*args)")
    + frame("accelerate/utils/fsdp_utils.py", "fsdp2_prepare_model", "f(cpu_offload=fsdp2_plugin.cpu_offload)")
    + frame("accelerate/utils/fsdp_utils.py", "fsdp2_load_full_state_dict", "full_param.detach().to(device)")
)
KILLED = "Loading checkpoint shards:  40%|####      | 2/5 [00:10<00:15]\nKilled"

SYNCED = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
MORE_RAM = "more RAM, or a larger memory limit"
NEVER = {"optim", "deepspeed", "device_map", "activation_checkpointing", "gradient_checkpointing"}


def job(batch: int = 1, accumulation: int = 1, **settings: Any) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "optim": "adamw_torch",
        "fsdp": True, "fsdp_config": settings,
    }  # fmt: skip


def parts_of(changes: Sequence[Change]) -> list[str]:
    """The last word of each change's setting."""
    return [change.setting.rpartition(".")[2] for change in changes]


def settings_of(text: str, arguments: dict[str, Any] | None) -> list[str]:
    explanation = explanation_of(text, arguments)
    assert not NEVER & set(keys(explanation))
    return parts_of(explanation.changes)


@pytest.mark.parametrize(
    ("text", "phase", "place"),
    [
        (FORWARD + GATHER, "forward", "gathered layer"),
        (BACKWARD + COPY_OUT, "backward", "gathered layer"),
        (BACKWARD + REDUCE, "backward", "reduced gradients"),
        (STATES, "optimizer", "optimizer states"),
        (SAVE, "save", "gathered weights"),
        (PREPARE, "load", None),
    ],
)
def test_places(text: str, phase: str, place: str | None) -> None:
    error = explanation_of(text + gpu()).error
    assert error is not None
    assert (error.trace.phase, error.trace.place) == (phase, place)
    assert "FSDP" in error.trace.in_use and "offload" not in error.trace.in_use


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        *((text + gpu(), job(4, 8), ["per_device_train_batch_size", "activation_checkpointing",
                                     "gradient_accumulation_kwargs"])
          for text in (FORWARD + GATHER, BACKWARD + REDUCE)),
        (FORWARD + GATHER + gpu(), job(4), ["per_device_train_batch_size", "activation_checkpointing", "cpu_offload"]),
        (BACKWARD + COPY_OUT + gpu(), job(activation_checkpointing=True, reshard_after_forward=False),
         ["reshard_after_forward", "cpu_offload", "processes"]),
        (BACKWARD + REDUCE + gpu(), {**job(1, 8, activation_checkpointing=True, cpu_offload=True), **SYNCED},
         ["processes", "max_length"]),
        (STATES + gpu(), job(), ["cpu_offload", "processes", "target_modules"]),
        (STATES + gpu(), None, ["cpu_offload", "processes", "target_modules"]),
        (SAVE + gpu(), job(), ["state_dict_type", "save_only_model"]),
        (KILLED, job(), ["dtype", "cpu_ram_efficient_loading", MORE_RAM]),
        (KILLED, job(cpu_ram_efficient_loading=True), ["dtype", MORE_RAM]),
    ],
)  # fmt: skip
def test_advice(text: str, arguments: dict[str, Any] | None, expected: list[str]) -> None:
    assert settings_of(text, arguments) == expected


TENSOR_PARALLEL = (
    FORWARD
    + frame("transformers/models/llama/modeling_llama.py", "forward", "down_proj = self.down_proj(x)")
    + frame("transformers/distributed/tensor_parallel.py", "tp_forward")
    + frame("transformers/distributed/tensor_parallel.py", "transform_output_post_forward")
    + frame("torch/distributed/tensor/_api.py", "redistribute")
    + frame("torch/distributed/_functional_collectives.py", "all_reduce")
)


def test_tensor_parallelism_alone_is_not_fsdp() -> None:
    """Defect: settings of FSDP for a model that it does not shard; DTensor's frames are those of both."""
    explanation = explanation_of(TENSOR_PARALLEL + gpu(), {"per_device_train_batch_size": 4})
    assert explanation.error is not None and "FSDP" not in explanation.error.trace.in_use
    assert explanation.changes and not [each.key for each in explanation.changes if "fsdp" in each.key]

    message = parse_message(gpu())
    assert message is not None
    run: Any = {"versions": {}, "arguments": {"fsdp": False}}
    for record, shards in ((run, False), ({**run, "engine": "FSDP2"}, True)):
        assert FailedJob(message, trace(STATES.splitlines()), RunView(record, {})).uses("FSDP") is shards


def test_a_sharded_save_is_not_proposed_twice() -> None:
    proposed = settings_of(SAVE + gpu(), job(state_dict_type="SHARDED_STATE_DICT"))
    assert not {"state_dict_type", "save_only_model"} & set(proposed)


def test_smaller_batches_need_each_batch_synchronised() -> None:
    """Without accumulation the gradient is split; the change brings accumulation."""
    for accumulation, named in ((1, True), (8, False)):
        first = explanation_of(FORWARD + GATHER + gpu(), job(4, accumulation)).changes[0]
        assert ("sync_each_batch: true" in first.reason) is named
    assert "sync_each_batch: true" in explanation_of(FORWARD + GATHER + gpu()).changes[0].reason, "without arguments"


def test_adapters_are_checkpointed_by_trainer() -> None:
    """FSDP's checkpointing would save an empty adapter."""
    changes = explanation_of(FORWARD + GATHER + gpu(), {**job(4), "use_peft": True}).changes
    assert [change.key for change in changes][1] == "arguments.activation_checkpointing"


@pytest.mark.parametrize(
    ("phase", "settings", "expected"),
    [
        ("optimizer", {}, ["cpu_offload", "processes", "optim"]),
        ("forward", {"reshard_after_forward": False}, ["cpu_offload", "reshard_after_forward", "processes"]),
        ("save", {"state_dict_type": "FULL_STATE_DICT"}, ["state_dict_type", "save_only_model"]),
    ],
)
def test_advice_from_records(phase: str, settings: dict[str, Any], expected: list[str]) -> None:
    run: Any = {
        "engine": "FSDP2", "world_size": 4, "parameters": 8_000_000_000, "trainable_parameters": 8_000_000_000,
        "arguments": job(**{"activation_checkpointing": True, **settings}), "hardware": {"device_type": "cuda"},
    }  # fmt: skip
    categories = {"weights_gib": 7.5, "gradients_gib": 7.5, "optimizer_gib": 14.9, "activations_gib": 1.0}
    changes = suggest(run, {"phase": phase, "categories": categories, "cause": "size"})
    parts = (
        change.value if isinstance(change.value, dict) else {change.key.rpartition(".")[2]: 0} for change in changes
    )
    assert [next(iter(part)) for part in parts] == expected
