"""What `memkit predict` shall predict: a recipe, a preset, or Trainer's defaults, for a model, a card and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.errors import InputError

if TYPE_CHECKING:
    from hf_memkit.hardware import Machine
    from hf_memkit.prediction import Prediction
    from hf_memkit.prediction.defaults import LookedAt
    from hf_memkit.recipe.schema import Recipe
    from hf_memkit.request import Request
    from hf_memkit.setup import Setup

__all__ = ["of_recipe", "prepare", "preset_and_techniques"]

_BATCH = "per_device_train_batch_size"
_LENGTH = "data.sequence_length"
_NOT_TRAINER_S: Final = frozenset(
    {
        "activation_offloading", "attn_implementation", "dtype", "load_in_4bit", "load_in_8bit", "packing",
        "padding_free", "torch_dtype", "use_lora", "use_peft",
    }
)  # fmt: skip
"""Arguments of scripts that decide memory, and are no fields of TrainingArguments (trl 1.16.0: model_config.py,
sft_config.py)."""


def prepare(request: Request, before_model: Callable[[], None] | None = None) -> Setup:
    """The setup of a preset or of Trainer's defaults. What can be known early is told early: names first, then the
    model.

    Args:
        request: what was asked for, its arguments read.
        before_model: called when names and values are known to be good, before the model is looked at, which takes
            seconds.

    Returns:
        The setup: what was assumed is in its `notes`, what makes it another job than the user's in its `warnings`.

    Raises:
        InputError: something that was asked for does not exist, or has no sense.
        SettingError: values that contradict each other, or would have no effect; all are listed.
    """
    from hf_memkit.hardware import described_gpu, described_machine
    from hf_memkit.models import refuse_absent, why_no_hub
    from hf_memkit.own_arguments import is_field, length_of
    from hf_memkit.request import refuse_too_long

    described = described_gpu(request.gpu, request.gpu_memory)
    own, notes = dict(request.arguments), list(request.notes)
    warnings = _left_out(request.args_file, own)
    model_name = request.model or own.get("model_name_or_path")
    if not model_name:
        where = f", and {request.args_file} names none (model_name_or_path)" if request.args_file else ""
        raise InputError(f"--model: give a hub ID or a folder{where}; for example: memkit predict --model gpt2-xl")
    longest = refuse_absent(str(model_name))
    length = request.sequence_length or length_of(own, notes)
    refuse_too_long(str(model_name), length, longest)
    from hf_memkit.prediction.defaults import look_at, refuse_precision, with_class

    if not request.preset:
        refuse_precision(own, described)
    # After the rest: looking for this machine's card can take importing torch.
    machine = described_machine(request.gpu, request.gpu_memory, request.ram, None)
    if before_model is not None:
        before_model()
    model = look_at(str(model_name), trust_remote_code=request.trust_remote_code, shapes=not request.preset)
    refuse_too_long(model.name, length, model.maximum_length)
    setup: Setup
    if request.preset:
        if model.own_code:
            raise InputError(
                f"--preset: presets are sized by the shapes of transformers' own models, and {model.name} brings its "
                f"own code; leave --preset out, and give arguments with --set or --args"
            )
        from hf_memkit.presets.resolve import resolve_preset

        made = resolve_preset(replace(request, model=model.name, sequence_length=length))
        setup = with_class(made, model)
        notes += [note for note in made.notes if "left out" in note]
        # What it needs by formula is what is predicted here; what else the card lacks no trace shows.
        warnings += [f"{request.preset} {problem}" for problem in made.problems if "by formula" not in problem]
    else:
        # Only a file holds anything else than fields; asking transformers for them takes a second.
        fields = {key: value for key, value in own.items() if request.args_file is None or is_field(key)}
        setup = _defaults(request, model, fields, machine, notes)
    setup = _with_sizes(_generating(setup, own), length, model.maximum_length)
    for setting in setup.settings:
        if setting.key == f"arguments.{_BATCH}" and _BATCH not in own:
            notes.append(f"batches of {setting.value} sequences a card: {setting.reason}")
        elif setting.key == _LENGTH and not length:
            notes.append(f"sequences of {setting.value} tokens: {setting.reason}")
    if machine.gpu is None:
        notes.append("no GPU here and none named (--gpu, --gpu-memory): there is no verdict")
    if model.origin == "architecture":
        notes.append(f"{model.name} is built from memkit's list of well-known models: {why_no_hub()}")
    return replace(setup, request=request, notes=tuple(notes), warnings=tuple(warnings))


def of_recipe(
    recipe: Recipe, request: Request, before_model: Callable[[], None] | None = None
) -> tuple[Setup, Prediction | None]:
    """(the recipe's setup, as `memkit recipe` would run it on the card in question; the prediction that it was chosen
    by, if it was made now).

    It is chosen by the recipe's stored predictions where they are of it, else as `memkit recipe` chooses; by formula
    without a trace, which is where `before_model` is None.

    Raises:
        InputError: there is no such variant, model or card.
        SettingError: settings that are wrong, or contradict the recipe.
        DoesNotFitError: no variant was named, and none fits.
    """
    from hf_memkit.hardware import described_gpu, described_machine
    from hf_memkit.models import hub_reachable
    from hf_memkit.recipe.resolve import refuse_wrong
    from hf_memkit.techniques.batch import split_batch

    described_gpu(request.gpu, request.gpu_memory)
    request = replace(request, gpus=request.gpus or recipe.gpus)
    refuse_wrong(recipe, request)
    split_batch(recipe.sequences_per_step, 1, (request.gpus or 1) * request.nodes, request.arguments)
    # After the rest: looking for this machine's card can take importing torch.
    machine = described_machine(request.gpu, request.gpu_memory, request.ram, None)
    if before_model is not None:
        before_model()
    from hf_memkit.recipe.choose import choose
    from hf_memkit.recipe.predictions import chosen_beforehand
    from hf_memkit.recipe.resolve import resolve

    reachable, prediction = hub_reachable(), None
    setup = chosen_beforehand(recipe, machine, request, use_hub=reachable)
    if setup is None and before_model is not None:
        setup, prediction = choose(recipe, machine, request, use_hub=reachable)
    setup = setup or resolve(recipe, machine, request, use_hub=reachable)
    warnings = (
        f"variant {setup.preset} {problem}"
        for problem in setup.problems
        if "by formula" not in problem and "predicted not to fit" not in problem
    )
    return replace(setup, notes=(f"variant {setup.preset}: {setup.why}",), warnings=tuple(warnings)), prediction


def _left_out(path: str | None, own: Mapping[str, Any]) -> list[str]:
    """What the user's file holds that may decide memory, and is no part of the prediction."""
    from hf_memkit.argument_values import unknown

    if path is None:
        return []
    strange = [str(name) for name in own if unknown(str(name))]
    scripts = [name for name, value in own.items() if name in _NOT_TRAINER_S and value not in (None, False)]
    warnings = []
    if strange:
        warnings.append(
            f"{path}: {', '.join(strange)}: no field of TrainingArguments or TRL; left out of the prediction"
        )
    if scripts:
        warnings.append(
            f"{path}: {', '.join(scripts)}: read by your script, not by Trainer; left out of the prediction (--preset "
            f"and --technique are in it)"
        )
    return warnings


def preset_and_techniques(preset: str | None, techniques: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """(the preset; techniques beside it). Techniques without a preset are composed as one would be.

    Raises:
        InputError: a name that is a preset's and a technique's, with nothing to put it on.
    """
    if preset or not techniques:
        return preset or "", tuple(techniques)
    from hf_memkit.presets import PRESETS

    alone = [each for each in techniques if each not in PRESETS]
    if not alone:
        name = techniques[0]
        raise InputError(f"--technique {name}: needs a preset to go on; there is one of that name: --preset {name}")
    return "+".join(alone), tuple(each for each in techniques if each in PRESETS)


def _defaults(request: Request, model: LookedAt, fields: dict[str, Any], machine: Machine, notes: list[str]) -> Setup:
    """Trainer's defaults with the user's own; the mistakes that the rules know in them are noted, for Trainer would
    train all the same."""
    from hf_memkit.checks import RULES, check
    from hf_memkit.job import DEFAULT_LENGTH, DEFAULT_MICRO_BATCH, Job
    from hf_memkit.prediction.defaults import default_setup

    job = Job(model.facts, machine, DEFAULT_MICRO_BATCH, DEFAULT_LENGTH, gpus=request.gpus or 1, nodes=request.nodes)
    setup = replace(default_setup(model, fields), job=job)
    found = [each for each in check(setup) if RULES[each.rule].module != "capacity"]
    notes += [f"{'known mistake' if each.refuses else 'hint'}: {each}" for each in found]
    return setup


def _generating(setup: Setup, own: Mapping[str, Any]) -> Setup:
    """The setup with those of `own` that are Seq2SeqTrainer's, where they say that evaluations generate."""
    from hf_memkit.compat import GENERATION_FIELDS

    if not own.get("predict_with_generate"):
        return setup
    for name in sorted(GENERATION_FIELDS & own.keys()):
        setup = setup.put(f"arguments.{name}", own[name], "yours")
    return setup.put("trainer.class", "transformers:Seq2SeqTrainer", "predict_with_generate is its argument")


def _with_sizes(setup: Setup, length: int | None, longest: int | None) -> Setup:
    """The setup with a batch and a length: its own, what was given, or else what is assumed."""
    from hf_memkit.job import DEFAULT_LENGTH, DEFAULT_MICRO_BATCH

    if f"arguments.{_BATCH}" not in setup:
        setup = setup.put(f"arguments.{_BATCH}", DEFAULT_MICRO_BATCH, "Trainer's default; --batch-size says another")
    if _LENGTH not in setup:
        assumed = min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
        why = "asked for" if length else "assumed; --sequence-length says another"
        setup = setup.put(_LENGTH, length or assumed, why)
    return setup
