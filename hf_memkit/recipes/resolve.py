"""Request → setup: the one door of every verb and of the Python API.

What the request names decides who resolves it: a recipe (`recipes/variant_search.py`), a DeepSpeed preset
(`presets/deepspeed_setup.py`), presets and techniques (`presets/for_model.py`), or none of them, which means Trainer's
defaults with the user's own arguments (`presets/whole_training.py`). Who judges whether a recipe's variant fits is a
parameter. What can be known early is told early: names and values first, then the machine, then the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_memkit.common.errors import InputError, SettingError
from hf_memkit.setup.job import DEFAULT_NVME
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Machine
    from hf_memkit.prediction import Prediction
    from hf_memkit.presets import PresetSetup
    from hf_memkit.recipes.schema import Recipe
    from hf_memkit.recipes.variant_search import Judge


def read_own(
    request: Request,
    settings: Sequence[str],
    args: str | None = None,
    *,
    batch_size: int | None = None,
    accumulation: int | None = None,
    recipe: Recipe | None = None,
) -> Request:
    """The request with the user's own arguments: those of a file (`args`), and of `--set` (`settings`), which win; and
    with the values of techniques that `--set` gives. Lists all that is wrong. `recipe`: where it is one; its fields
    are those of its own Trainer's arguments."""
    from hf_memkit.setup.own_arguments import read_file, read_pairs, read_values_and_pairs

    if recipe is not None:
        from hf_memkit.recipes.settings import ELSEWHERE
        from hf_memkit.recipes.tasks import find_task

        return replace(request, arguments=read_pairs(settings, ELSEWHERE, find_task(recipe.task).further_arguments))
    kinds: dict[str, type] = {}
    if request.preset:
        from hf_memkit.presets import compose

        techniques = compose(request.preset, request.techniques)  # an unknown name is told first
        kinds = {key: kind for one in techniques for key, kind in one.values.items()}
    from_file, notes = dict[str, Any](), list[str]()
    if args is not None:
        from hf_memkit.checks.reading import read

        from_file, notes = read_file(read(args))
    values, set_here = read_values_and_pairs(settings, kinds)
    for field, option, value in (
        ("per_device_train_batch_size", "--batch-size", batch_size),
        ("gradient_accumulation_steps", "--accumulation", accumulation),
    ):
        if value is not None and set_here.get(field, value) != value:
            raise SettingError(
                f"{option} {value} and --set {field}={set_here[field]}: the same field. Give one of them"
            )
        set_here |= {} if value is None else {field: value}
    return replace(
        request, values=values, arguments={**from_file, **set_here}, args_file=args, notes=(*request.notes, *notes)
    )


def resolve(
    request: Request,
    judge: Judge | None = None,
    *,
    recipe: Recipe | None = None,
    here: Machine | None = None,
    stored: bool = False,
    runs: bool = False,
) -> tuple[Setup, Prediction | None]:
    """The setup of what was asked for, whose `warnings` say what makes it another job than the user's; and the
    prediction that it was chosen by, if one was made now. Loads no weights and changes nothing on disk. Lists all that
    is wrong; a DoesNotFitError where no variant of a recipe was named, and none fits.

    Args:
        request: what was asked for, its arguments read.
        judge: predicts a recipe's candidates, as for `hf_memkit.recipes.variant_search`; None: nobody asks whether it
            fits.
        recipe: the request's, where it has been read already.
        here: this machine, where it has been looked at already.
        stored: whether the recipe's stored predictions are asked before the judge, or alone where that is None.
        runs: whether a recipe's setup will run here: of its variants those whose packages are missing are skipped.
    """
    if recipe is not None or request.recipe is not None:
        return _resolve_recipe(request, judge, recipe, here, stored=stored, runs=runs)
    if request.deepspeed:
        from hf_memkit.presets.deepspeed_setup import resolve_deepspeed

        return resolve_deepspeed(request), None
    from hf_memkit.presets.whole_training import resolve_training

    return resolve_training(request), None


def resolve_partly(request: Request, *, use_hub: bool | None = None) -> Setup:
    """A preset's setup as far as the model, the batch and the machine are known.

    Args:
        request: what was asked for, its arguments read.
        use_hub: whether the hub may be asked for the model's config; None: if it answers.
    """
    from hf_memkit.presets.for_model import resolve_preset
    from hf_memkit.setup.own_arguments import former_lines, length_of

    own, model = request.arguments, request.model
    notes = [*request.notes, *former_lines(request.args_file, own)]
    length = request.sequence_length or length_of(own, notes)
    if model is None and own.get("model_name_or_path"):
        model = _model_of_file(str(own["model_name_or_path"]), notes)
    setup = resolve_preset(replace(request, model=model, sequence_length=length), use_hub=use_hub)
    return setup.with_notes(*notes)


def preset(
    name: str,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    ram: str | None = None,
    global_batch_size: int | None = None,
    sequence_length: int | None = None,
    gpus: int = 1,
    nodes: int = 1,
    nvme_path: str = DEFAULT_NVME,
    techniques: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    use_hub: bool | None = None,
) -> PresetSetup:
    """A preset, or several presets and techniques joined by `+`, as one setup with a reason for each choice.

    Args:
        name: such as `"8bit"`, `"lean+lora"`, `"checkpointed+chunked-loss"`; `memkit preset list` names all.
        model: hub ID, local folder, or the name of a built-in architecture; None: settings only, no ledger.
        gpu: a GPU by name, such as `"RTX 4090"`; None and no `gpu_memory`: this machine's.
        gpu_memory: a GPU by its marketing size, such as `"16GB"`, with bf16.
        ram: this much RAM instead of this machine's.
        global_batch_size: sequences an optimizer step, all processes together: micro-batch × accumulation × processes
            come to exactly this.
        sequence_length: tokens; None: the model's longest up to 1024, or with `longest-sequence` what fits.
        gpus, nodes: processes on each machine, one GPU each, and machines.
        nvme_path: folder for what ZeRO-Infinity puts on disk.
        techniques: techniques that take the place of those that decide the same thing.
        values: values of techniques, such as `{"rank": 32}`.
        arguments: fields of TrainingArguments that win over the preset's; the reason then says what they replaced.
        use_hub: whether the hub may be asked for the model's config; None: if it answers.

    Returns:
        The setup; what the machine lacks for it is in its `problems`.

    Raises:
        InputError: an unknown preset, technique, GPU or model, or a number that is none.
        SettingError: presets that contradict each other (both are named), an unknown value or argument, or a batch
            that does not come out exactly; what would have no effect, or harm, with the reason
            (`hf_memkit.checks`). All are listed at once.
    """
    from hf_memkit.presets import PresetSetup
    from hf_memkit.setup.own_arguments import read_mapping

    techniques = (techniques,) if isinstance(techniques, str) else tuple(techniques)
    _refuse_no_text(model=model, gpu=gpu, gpu_memory=gpu_memory, ram=ram)
    request = Request(
        preset=name, techniques=techniques, values=values or {}, model=model, gpu=gpu, gpu_memory=gpu_memory, ram=ram,
        gpus=gpus, nodes=nodes, global_batch_size=global_batch_size, sequence_length=sequence_length,
        nvme_path=nvme_path, arguments=read_mapping(arguments or {}, "arguments"),
    )  # fmt: skip
    return PresetSetup.of(resolve_partly(request, use_hub=use_hub))


def predict_recipe(
    name: str,
    *,
    variant: str = "auto",
    model: str | None = None,
    data: str | None = None,
    sequence_length: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    ram: str | None = None,
    gpus: int | None = None,
    nodes: int = 1,
) -> Prediction:
    """What a recipe will need on a GPU, which need not be here.

    >>> predict_recipe("gpt2-on-16gb", gpu="T4").verdict  # doctest: +SKIP
    'fits'

    Args:
        name: a recipe's name, or its YAML file.
        variant: one of its variants, or `"auto"`: the first that is predicted to fit.
        model, sequence_length: in the place of the recipe's.
        data: a file or folder on this machine, with whose worst batch it is predicted; None: with sequences of its
            length.
        arguments: fields of TrainingArguments, which win over the recipe's.
        gpu: a GPU's name, or a size such as `"16GB"`; None: this machine's, or else the recipe's own.
        gpu_memory, ram: sizes in the place of the GPU's and of this machine's.
        gpus: GPUs on each machine; None: the recipe's.
        nodes: machines.

    Raises:
        InputError: there is no such recipe, variant, model or GPU, or nothing can be said of it.
        DataError: the data cannot be used.
        SettingError: arguments that are wrong, or contradict the recipe.
        DoesNotFitError: `"auto"`, and no variant is predicted to fit.
    """
    from hf_memkit.recipes.by_data import batches_of, judge_of
    from hf_memkit.setup.own_arguments import read_trainer

    request = Request(
        recipe=name, variant=variant, model=model, data=data, gpu=gpu, gpu_memory=gpu_memory, ram=ram, gpus=gpus,
        nodes=nodes, sequence_length=sequence_length, arguments=read_trainer(arguments)[0],
    )  # fmt: skip
    judge = judge_of(request)
    setup, prediction = resolve(request, judge)
    prediction = prediction or judge(setup)
    batches = batches_of(judge, setup, prediction)
    said = [batches.said(prediction)] if batches is not None else []
    return prediction.with_notes(*said, f"variant {setup.preset}: {setup.why}")


def _refuse_no_text(**given: Any) -> None:
    for key, value in given.items():
        if value is None or isinstance(value, str):
            continue
        if key == "model":
            raise InputError(
                f"model: expected a hub ID or a folder, got {type(value).__name__}. Pass a model object to "
                f"setup.trainer(…, model=model)"
            )
        example = "'RTX 4090'" if key == "gpu" else "'16GB'"
        raise InputError(f"{key}={value!r}: must be text, such as {example}")


def _resolve_recipe(
    request: Request, judge: Judge | None, recipe: Recipe | None, here: Machine | None, *, stored: bool, runs: bool
) -> tuple[Setup, Prediction | None]:
    """As `memkit recipe` runs it; by its stored predictions where they are asked and are of it."""
    from hf_memkit.catalog.hardware import described_gpu, described_machine
    from hf_memkit.catalog.models import hub_reachable
    from hf_memkit.common.units import parse_size
    from hf_memkit.prediction.worker import shared_worker
    from hf_memkit.recipes.schema import load_recipe
    from hf_memkit.recipes.settings import refuse_wrong

    recipe = recipe or load_recipe(request.recipe or "")
    request = replace(request, gpus=request.gpus or recipe.gpus)
    refuse_wrong(recipe, request)
    # After the rest: looking for this machine's GPU can take importing torch.
    if here is None:
        machine = described_machine(request.gpu, request.gpu_memory, request.ram, None)
    else:
        machine = here.with_gpu(described_gpu(request.gpu, request.gpu_memory) or here.gpu)
        machine = machine.with_ram(parse_size(request.ram, "--ram")) if request.ram else machine
    if judge is not None and not stored:
        shared_worker().start()  # while the model is looked at here, it loads its libraries
    from hf_memkit.recipes.variant_search import choose, stored_or, unjudged

    judge = stored_or(judge, recipe) if stored else judge or unjudged
    return choose(recipe, machine, request, use_hub=hub_reachable(), judge=judge, runs=runs)


def _model_of_file(name: str, notes: list[str]) -> str | None:
    """The model that the user's file names, if memkit can look at it."""
    from hf_memkit.catalog.models import describe, hub_reachable

    try:
        describe(name, use_hub=hub_reachable(), use_built_in=True)
    except InputError as error:
        notes.append(f"nothing is computed for the model of your file: {error}")
        return None
    notes.append(f"computed for the model of your file, {name}")
    return name
