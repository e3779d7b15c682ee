"""Request → setup: the entry point of every verb and of the Python API.

A recipe is resolved by `recipes/variant_search.py`, a DeepSpeed preset by `presets/deepspeed_setup.py`, and everything
else (presets, techniques, Trainer's defaults) by `presets/whole_training.py`. A preset without a model or batch is
resolved by `presets/for_model.py`, as far as possible. Errors are reported as early as possible: first names and
values, then the machine, then the model.
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


def read_own_arguments(
    request: Request,
    settings: Sequence[str],
    args: str | None = None,
    *,
    batch_size: int | None = None,
    accumulation: int | None = None,
    recipe: Recipe | None = None,
) -> Request:
    """Add the user's own arguments to the request, and the values of techniques in `--set`.

    Args:
        request: with model, preset and machine.
        settings: `--set` pairs, which override the file's.
        args: path of the file with the user's training arguments.
        batch_size, accumulation: options that set two of the fields.
        recipe: the recipe, if any. Then only `settings` counts, for the arguments of its Trainer.

    Raises:
        SettingError: lists everything wrong.
    """
    from hf_memkit.setup.own_arguments import read_file, read_pairs, read_values_and_pairs

    if recipe is not None:
        from hf_memkit.recipes.settings import ELSEWHERE
        from hf_memkit.recipes.tasks import find_task

        further = find_task(recipe.task).further_arguments
        return replace(request, arguments=read_pairs(settings, ELSEWHERE, further))

    types_of_values: dict[str, type] = {}
    if request.preset:
        from hf_memkit.presets import compose

        for technique in compose(request.preset, request.techniques):  # reports unknown names first
            types_of_values |= technique.values
    arguments: dict[str, Any] = {}
    notes: list[str] = []
    if args is not None:
        from hf_memkit.checks.reading import read

        arguments, notes = read_file(read(args))

    values, pairs = read_values_and_pairs(settings, types_of_values)
    options = [
        ("--batch-size", batch_size, "per_device_train_batch_size"),
        ("--accumulation", accumulation, "gradient_accumulation_steps"),
    ]
    for option, value, field in options:
        if value is None:
            continue
        if pairs.get(field, value) != value:
            raise SettingError(f"{option} {value}, --set {field}={pairs[field]}: the same field. Give one of them")
        pairs[field] = value
    return replace(
        request, values=values, arguments={**arguments, **pairs}, args_file=args, notes=(*request.notes, *notes)
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
    """Resolve a request. Loads no weights and changes nothing on disk.

    Returns the setup, and the prediction by which a recipe's variant was chosen; None if none was needed. All
    arguments but `request` matter for recipes only.

    Args:
        request: what was asked for, with the user's own arguments.
        judge: predicts a recipe's candidates, as in `hf_memkit.recipes.variant_search`; None: no check whether they
            fit.
        recipe: the request's recipe, if already read.
        here: this machine, if already known.
        stored: whether the recipe's stored predictions are used before `judge`, or alone if that is None.
        runs: whether a recipe's setup will run here: variants with missing packages are then skipped.
    """
    if recipe is not None or request.recipe is not None:
        return _resolve_recipe(request, judge, recipe, here, stored=stored, runs=runs)
    if request.deepspeed:
        from hf_memkit.presets.deepspeed_setup import resolve_deepspeed

        return resolve_deepspeed(request), None
    from hf_memkit.presets.whole_training import resolve_training

    return resolve_training(request), None


def resolve_partly(request: Request, *, use_hub: bool | None = None) -> Setup:
    """A preset's setup without what depends on an unknown model, batch or machine; `resolve` needs all of them.

    Args:
        request: what was asked for, its arguments read.
        use_hub: whether the hub may be asked for the model's config. Default: if it can be reached.
    """
    from hf_memkit.catalog.models import describe, hub_reachable
    from hf_memkit.presets.for_model import resolve_preset
    from hf_memkit.setup.own_arguments import former_lines, length_of

    own = request.arguments
    model = request.model
    notes = [*request.notes, *former_lines(request.args_file, own)]
    length = request.sequence_length or length_of(own, notes)
    if model is None and own.get("model_name_or_path"):
        name = str(own["model_name_or_path"])
        try:
            describe(name, use_hub=hub_reachable() if use_hub is None else use_hub, use_built_in=True)
            model = name
            notes.append(f"computed for the model in your file, {name}")
        except InputError as error:
            notes.append(f"sizes are not computed for the model in your file: {error}")
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
        ram: RAM to assume instead of this machine's.
        global_batch_size: sequences in an optimizer step of all processes; micro-batch × accumulation × processes
            equal it exactly.
        sequence_length: tokens; None: the model's maximum up to 1024, or with `longest-sequence` the longest that
            fits.
        gpus, nodes: processes on each machine, one GPU each, and machines.
        nvme_path: folder for ZeRO-Infinity's swap files.
        techniques: techniques that replace others with the same purpose.
        values: values of techniques, such as `{"rank": 32}`.
        arguments: fields of TrainingArguments that override the preset's; the reason then names the replaced value.
        use_hub: whether the hub may be asked for the model's config; None: if it answers.

    Returns:
        The setup; its `problems` list what the machine lacks for it.

    Raises:
        InputError: an unknown preset, technique, GPU or model, or an invalid number.
        SettingError: presets that contradict each other (both are named), an unknown value or argument, a batch that
            cannot be exact, or settings without effect or with harm (`hf_memkit.checks`). All are listed.
    """
    from hf_memkit.presets import PresetSetup
    from hf_memkit.setup.own_arguments import read_mapping

    techniques = (techniques,) if isinstance(techniques, str) else tuple(techniques)
    if model is not None and not isinstance(model, str):
        expected = f"model: expected a hub ID or a folder, got {type(model).__name__}"
        raise InputError(f"{expected}. Pass a model object to setup.trainer(…, model=model)")
    for key, value in {"gpu": gpu, "gpu_memory": gpu_memory, "ram": ram}.items():
        if value is not None and not isinstance(value, str):
            example = "'RTX 4090'" if key == "gpu" else "'16GB'"
            raise InputError(f"{key}={value!r}: must be text, such as {example}")
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
    """Predict the memory of a recipe on a GPU, which need not be here.

    >>> predict_recipe("gpt2-on-16gb", gpu="T4").verdict  # doctest: +SKIP
    'fits'

    Args:
        name: a recipe's name, or its YAML file.
        variant: one of its variants, or `"auto"`: the first that is predicted to fit.
        model, sequence_length: instead of the recipe's.
        data: a file or folder on this machine, whose worst batch is predicted; None: sequences of the recipe's length.
        arguments: fields of TrainingArguments that override the recipe's.
        gpu: a GPU's name, or a size such as `"16GB"`; None: this machine's, or else the recipe's own.
        gpu_memory, ram: sizes instead of the GPU's and of this machine's.
        gpus: GPUs on each machine; None: the recipe's.
        nodes: machines.

    Raises:
        InputError: there is no such recipe, variant, model or GPU, or it cannot be predicted.
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
    batch_notes = [batches.sentence(prediction)] if batches is not None else []
    return prediction.with_notes(*batch_notes, f"variant {setup.preset}: {setup.why}")


def _resolve_recipe(
    request: Request, judge: Judge | None, recipe: Recipe | None, here: Machine | None, *, stored: bool, runs: bool
) -> tuple[Setup, Prediction | None]:
    """The setup that `memkit recipe` runs, selected by stored predictions if `stored` and there are any."""
    from hf_memkit.catalog.hardware import described_gpu, described_machine
    from hf_memkit.catalog.models import hub_reachable
    from hf_memkit.common.units import parse_size
    from hf_memkit.prediction.worker import shared_worker
    from hf_memkit.recipes.schema import load_recipe
    from hf_memkit.recipes.settings import refuse_wrong

    recipe = recipe or load_recipe(request.recipe or "")
    request = replace(request, gpus=request.gpus or recipe.gpus)
    refuse_wrong(recipe, request)
    # After the checks above, because finding this machine's GPU may import torch.
    if here is None:
        machine = described_machine(request.gpu, request.gpu_memory, request.ram, None)
    else:
        machine = here.with_gpu(described_gpu(request.gpu, request.gpu_memory) or here.gpu)
        if request.ram:
            machine = machine.with_ram(parse_size(request.ram, "--ram"))
    if judge is not None and not stored:
        shared_worker().start()  # it loads its libraries while the model is described here
    from hf_memkit.recipes.variant_search import choose, predict_nothing, stored_or

    judge = stored_or(judge, recipe) if stored else judge or predict_nothing
    return choose(recipe, machine, request, use_hub=hub_reachable(), judge=judge, runs=runs)
