"""A preset, or Trainer's defaults with the user's own arguments, as a whole training: with model, batch and length.
Errors are reported as early as possible: first names and values, then the machine, then the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from hf_memkit.catalog.argument_values import is_unknown
from hf_memkit.catalog.former_arguments import former_arguments
from hf_memkit.catalog.hardware import described_gpu, described_machine
from hf_memkit.catalog.library_versions import GENERATION_FIELDS
from hf_memkit.catalog.models import refuse_absent, why_no_hub
from hf_memkit.common.errors import InputError
from hf_memkit.prediction.defaults import default_setup, describe_model, refuse_precision, with_class
from hf_memkit.prediction.worker import shared_worker
from hf_memkit.presets.for_model import resolve_preset
from hf_memkit.presets.preset_setup import mistakes_of
from hf_memkit.setup.job import DEFAULT_LENGTH, DEFAULT_MICRO_BATCH, Job, shortages
from hf_memkit.setup.own_arguments import former_lines, is_field, length_of
from hf_memkit.setup.request import Request, refuse_too_long
from hf_memkit.setup.setup import Setup

_BATCH: Final = "per_device_train_batch_size"
_LENGTH: Final = "data.sequence_length"
_UNKNOWN_TO_TRAINER: Final = frozenset(
    {
        "activation_offloading", "attn_implementation", "dtype", "load_in_4bit", "load_in_8bit", "packing",
        "padding_free", "torch_dtype", "use_lora", "use_peft",
    }
)  # fmt: skip
"""Arguments of scripts that affect memory, and are no fields of TrainingArguments (trl 1.16.0: model_config.py,
sft_config.py)."""


def resolve_training(request: Request) -> Setup:
    """The setup of a preset or of Trainer's defaults, with assumptions in its `notes`, and differences from the user's
    job in its `warnings`. Raises MemkitError if values do not exist, contradict each other or would have no effect."""
    described_gpu(request.gpu, request.gpu_memory)  # an unknown one is reported first
    own, notes = dict(request.arguments), list(request.notes)
    warnings = _left_out(request.args_file, own)
    model_name = request.model or own.get("model_name_or_path")
    if not model_name:
        where = f", and {request.args_file} names none (model_name_or_path)" if request.args_file else ""
        raise InputError(
            f"nothing to predict{where}; give a training script (memkit predict train.py -- ARGUMENTS), --recipe, or "
            f"--model with a hub ID or a folder (memkit predict --model gpt2-xl)"
        )
    longest = refuse_absent(str(model_name))
    length = request.sequence_length or length_of(own, notes)
    refuse_too_long(str(model_name), length, longest)
    if not request.preset:
        refuse_precision(own)
    # Last, because finding this machine's GPU may import torch.
    machine = described_machine(request.gpu, request.gpu_memory, request.ram, None)
    shared_worker().start()  # it loads its libraries while the model is read here
    model = describe_model(str(model_name), trust_remote_code=request.trust_remote_code, shapes=not request.preset)
    refuse_too_long(model.name, length, model.maximum_length)
    if request.preset:
        if model.own_code:
            raise InputError(
                f"--preset: presets support transformers' built-in models only, and {model.name} uses custom code. "
                f"Remove --preset, and give arguments with --set or --args"
            )
        resolved = resolve_preset(replace(request, model=model.name, sequence_length=length))
        setup = with_class(resolved, model)
        notes += [note for note in resolved.notes if "left out" in note]
        sums = shortages(resolved.ledger, resolved.resolved_for.machine)  # the prediction replaces them
        warnings += [f"{request.preset} {problem}" for problem in resolved.problems if problem not in sums]
    else:
        # Only a file has names other than fields; reading transformers' fields takes a second.
        fields = {key: value for key, value in own.items() if request.args_file is None or is_field(key)}
        job = Job(model.facts, machine, gpus=request.gpus or 1, nodes=request.nodes)
        setup = replace(default_setup(model, fields), job=job)
        # Mistakes that rules detect become notes, because Trainer would train with them.
        notes += [f"{'known mistake' if problem.refuses else 'hint'}: {problem}" for problem in mistakes_of(setup)[0]]
    if own.get("predict_with_generate"):
        for name in sorted(GENERATION_FIELDS & own.keys()):
            setup = setup.put(f"arguments.{name}", own[name], "yours")
        why = "only Seq2SeqTrainer has predict_with_generate"
        setup = setup.put("trainer.class", "transformers:Seq2SeqTrainer", why)
    if f"arguments.{_BATCH}" not in setup:
        setup = setup.put(f"arguments.{_BATCH}", DEFAULT_MICRO_BATCH, "Trainer's default; --batch-size sets another")
    if _LENGTH not in setup:
        assumed = min(DEFAULT_LENGTH, model.maximum_length or DEFAULT_LENGTH)
        why = "asked for" if length else "assumed; --sequence-length sets another"
        setup = setup.put(_LENGTH, length or assumed, why)
    for setting in setup.settings:
        if setting.key == f"arguments.{_BATCH}" and _BATCH not in own:
            notes.append(f"batches of {setting.value} sequences a GPU: {setting.reason}")
        elif setting.key == _LENGTH and not length:
            notes.append(f"sequences of {setting.value} tokens: {setting.reason}")
    if machine.gpu is None:
        notes.append("no verdict: this machine has no GPU, and none is named (--gpu NAME)")
    if model.origin == "architecture":
        notes.append(f"the shapes of {model.name} come from memkit's list of well-known models: {why_no_hub()}")
    return replace(setup, request=request, notes=tuple(notes), warnings=tuple(warnings))


def _left_out(path: str | None, own: Mapping[str, Any]) -> list[str]:
    """Warnings about arguments in the user's file that may affect memory, and are not in the setup."""
    if path is None:
        return []
    unknown = [str(name) for name in own if is_unknown(str(name)) and name not in former_arguments(own)]
    scripts = [name for name, value in own.items() if name in _UNKNOWN_TO_TRAINER and value not in (None, False)]
    warnings = former_lines(path, own)
    if unknown:
        warnings.append(
            f"{path}: {', '.join(unknown)}: no field of TrainingArguments or TRL; left out of the prediction"
        )
    if scripts:
        warnings.append(
            f"{path}: {', '.join(scripts)}: read by your script, not by Trainer; left out of the prediction (--preset "
            f"and --technique are in it)"
        )
    return warnings
