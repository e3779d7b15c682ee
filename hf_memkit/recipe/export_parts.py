"""The part of an exported script that no library has: memkit's parts, copied beside it, and how they are wired."""

from __future__ import annotations

import textwrap
from typing import Any, Final

from hf_memkit import components
from hf_memkit.recipe.export_data import literal
from hf_memkit.train import optimizer_options, part_files
from hf_memkit.training_setup import TrainingSetup

__all__ = [
    "comment",
    "copied_parts",
    "library_imports",
    "model_part_lines",
    "optimizer_lines",
    "part_imports",
    "trainer_part_lines",
]

_WIDTH: Final = 110


def comment(reason: str, indent: str = "") -> list[str]:
    """`reason` as comment lines."""
    return textwrap.wrap(reason, _WIDTH - len(indent), initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def copied_parts(setup: TrainingSetup) -> dict[str, str]:
    """`{file name beside the script: its text}` of the parts that the setup needs."""
    names = [*setup.section("model_parts"), *setup.section("trainer_parts")]
    for module in (_optimizer(setup)[0], str(setup.get("trainer.class", "")).partition(":")[0]):
        if module is not None and module.startswith(f"{components.__name__}."):
            names.append(module.rpartition(".")[2])
    files = {file.name: file for name in names for file in part_files(name)}
    # Beside a script the files of a part find one another by their own names.
    package = f"from {components.__name__}."
    return {name: file.read_text(encoding="utf-8").replace(package, "from ") for name, file in files.items()}


def part_imports(setup: TrainingSetup) -> list[str]:
    """Imports of the files beside the script."""
    lines = [f"from {name} import install as install_{name}" for name in setup.section("model_parts")]
    lines += [f"from {name} import trainer_options as {name}_options" for name in setup.section("trainer_parts")]
    module, name = _optimizer(setup)
    if module is not None and module.startswith(f"{components.__name__}."):
        lines.append(f"from {module.rpartition('.')[2]} import {name}")
    return lines


def library_imports(setup: TrainingSetup) -> list[str]:
    """The import of the optimizer's class, where a library has it."""
    module, name = _optimizer(setup)
    return [] if module is None or module.startswith(f"{components.__name__}.") else [f"from {module} import {name}"]


def model_part_lines(setup: TrainingSetup) -> list[str]:
    """Lines that install the setup's parts on `model`, in the order of the setup."""
    lines = []
    for name, options in setup.section("model_parts").items():
        lines += comment(_reason(setup, f"model_parts.{name}"))
        lines.append(f"install_{name}({_call('model', options)})")
    return lines


def trainer_part_lines(setup: TrainingSetup, processing: str = "tokenizer") -> list[str]:
    """Lines that make `from_parts`, the keyword arguments that the setup's parts give to Trainer; none without.

    `processing`: the variable that holds tokenizer or processor.
    """
    sections = setup.section("trainer_parts")
    if not sections:
        return []
    lines = ["parts = ["]
    for name, options in sections.items():
        lines += comment(_reason(setup, f"trainer_parts.{name}"), "    ")
        common = f"model=model, processing_class={processing}, arguments=arguments"
        lines.append(f"    {name}_options({_call(common, options)}),")
    return [
        *lines,
        "]",
        'callbacks = [callback for part in parts for callback in part.pop("callbacks", [])]',
        "from_parts = {key: value for part in parts for key, value in part.items()}",
    ]


def optimizer_lines(setup: TrainingSetup) -> list[str]:
    """Lines of Trainer's argument `optimizer_cls_and_kwargs`; none where `optim` does."""
    options = optimizer_options(setup)
    if options is None:
        return []
    values = [f'            "{key}": {literal(value)},' for key, value in options.items()]
    start = ["    optimizer_cls_and_kwargs=(", f"        {_optimizer(setup)[1]},", "        {"]
    return [*start, *values, "        },", "    ),"]


def _optimizer(setup: TrainingSetup) -> tuple[str | None, str]:
    """(module, class) of the setup's own optimizer; (None, "") where Trainer's `optim` does."""
    if "optimizer.class" not in setup:
        return None, ""
    module, _, name = str(setup["optimizer.class"]).partition(":")
    return module, name


def _reason(setup: TrainingSetup, key: str) -> str:
    return next(setting.reason for setting in setup.settings if setting.key == key)


def _call(first: str, options: dict[str, Any]) -> str:
    return ", ".join([first, *(f"{key}={literal(value)}" for key, value in options.items())])
