"""Known mistakes in a traced training: the rules of `checks/`, asked about what the script really gave."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hf_memkit.catalog.library_versions import names_of
from hf_memkit.checks.apply import check, deepspeed_of_launcher
from hf_memkit.checks.reading import parse_json, read
from hf_memkit.checks.rule import RULES, Problem
from hf_memkit.checks.rules.optimizer_options import UNSEEN
from hf_memkit.checks.subject import Subject
from hf_memkit.common.errors import InputError, ScriptFailed
from hf_memkit.measuring.out_of_memory.explanation import explain_oom
from hf_memkit.prediction.launch_command import Launched
from hf_memkit.prediction.running_scripts import FIX_IT
from hf_memkit.prediction.traced_training import GivenSettings, TracedTraining

_BY_THE_SCRIPT: Final = (
    "accumulation-multiplies-the-loss", "accumulation-averages-means", "checkpointing-options-without-switch",
)  # fmt: skip
"""Rules that do not hold if the model is no causal language model or has its own loss, or if the script switches
checkpointing on."""

_OPTIONS: Final = (
    "version", "activation_checkpointing", "auto_wrap_policy", "offload_params", "reshard_after_forward",
    "state_dict_type",
)  # fmt: skip
"""Settings of FSDP whose variables have, where the user gave no option, the value that accelerate assumes
(accelerate 1.15.0: utils/launch.py 304-333)."""

_OVERRIDE: Final = ("fsdp", "use_fsdp", "use_deepspeed", "deepspeed", "zero", "offload", "mixed")
"""Beginnings of the options of `accelerate launch` that override its YAML."""

_NAMED: Final = 4
"""Letters of a value from which on a message that contains them is about it."""


def known_mistakes(
    training: TracedTraining | None, gpus: int, nodes: int, launched: Launched | None = None
) -> tuple[str, ...]:
    """Sentences without a full stop: the mistakes in a traced training that the rules know, without hints, and without
    what is about the machine and about sizes: the prediction has these more exactly.

    Args:
        gpus, nodes: GPUs of each machine, and machines.
        launched: the command that starts the script; None: Python alone.
    """
    if training is None or training.given is None:
        return ()
    sentences = []
    for problem in check(_subject(training, training.given, gpus, nodes, launched)):
        rule = RULES[problem.rule]
        if problem.refuses and rule.module != "capacity" and rule.id not in _BY_THE_SCRIPT:
            sentence = str(problem).rstrip(".").replace(f", {UNSEEN}", "")
            sentences.append(f"{sentence} (rule {rule.id})")
    return tuple(sentences)


def explained(failure: ScriptFailed) -> ScriptFailed:
    """The failure of a script with the cause and the fix that memkit knows: of a rule about the arguments that the
    error names, or of `memkit explain`. The library's message stays, unless the class of the arguments raised it."""
    arguments, files = dict(failure.arguments), dict.fromkeys(("fsdp_config", "deepspeed"), "")
    for name in files:
        value = arguments.get(name)
        try:
            if isinstance(value, str) and value.lstrip().startswith("{"):
                arguments[name] = parse_json(name, value)[0]
            elif isinstance(value, str) and value:
                arguments[name], files[name] = read(value).content, value
        except InputError as error:
            if failure.refused_arguments:
                place = "" if str(error).startswith(name) else f"{name}: "
                return ScriptFailed(f"{failure.place}: {place}{error}; correct the JSON there", text=failure.text)
    config = arguments.get("deepspeed")
    subject = Subject(
        config=config if isinstance(config, Mapping) else None, config_file=files["deepspeed"], arguments=arguments,
        fsdp_file=files["fsdp_config"],
    )  # fmt: skip
    message = str(failure).removeprefix(f"{failure.place}: ").partition(f"; {FIX_IT}")[0]
    for problem in check(subject):
        if problem.severity == "error" and _names(message, problem):
            cause = f"{str(problem).rstrip('.')} (rule {problem.rule})"
            kept = "" if failure.refused_arguments else f"{message}. "
            return ScriptFailed(f"{failure.place}: {kept}{cause}", text=failure.text)
    if (known := explain_oom(failure.text).failure) is None:
        return failure
    fix = f"{known.what}. Fix: {known.fixes[0].assignment} ({known.fixes[0].reason})"
    return ScriptFailed(str(failure).replace(f"; {FIX_IT}", f". {fix}"), text=failure.text)


def _names(message: str, problem: Problem) -> bool:
    """Whether a library's message has a word of the wrong value, or the key. Keys of one word, such as `type`, stand
    in other messages too."""
    values = problem.value if isinstance(problem.value, list) else [problem.value]
    words = [word for value in values if isinstance(value, str) for word in value.split() if len(word) >= _NAMED]
    keys = [name for name in names_of(problem.key.rpartition(".")[2]) if "_" in name]
    return any(re.search(rf"(?<!\w){re.escape(each)}(?!\w)", message, re.IGNORECASE) for each in (*words, *keys))


def _subject(
    training: TracedTraining, given: GivenSettings, gpus: int, nodes: int, launched: Launched | None
) -> Subject:
    settings, dtypes = dict(given.settings), training.model.trained_dtypes
    if len(dtypes) == 1 and not given.own_optimizer:  # an optimizer of the script may round as it likes
        settings["model.dtype"] = dtypes[0]
    known: dict[str, Any] = {"config_file": given.files.get("deepspeed", "")}
    if training.engine is not None:
        known["config"] = training.engine.written
    if launched is not None and launched.is_launcher:
        known |= _of_launcher(training, given.arguments, launched)
    return Subject(
        arguments=given.arguments, settings=settings, model_config=given.model_config, gpus=gpus, nodes=nodes,
        fsdp_file=given.files.get("fsdp_config", ""), **known,
    )  # fmt: skip


def _of_launcher(training: TracedTraining, arguments: Mapping[str, Any], launched: Launched) -> dict[str, Any]:
    """Fields of `Subject`: accelerate's YAML, or, where options may override it, their settings of FSDP."""
    path = _config_file(launched.before)
    if path and not any(_option(word).startswith(_OVERRIDE) for word in launched.before):
        file = read(path)
        known = {"launcher": file.content, "launcher_file": path}
        config = deepspeed_of_launcher(file, arguments)
        if training.engine is not None and not arguments.get("deepspeed") and config is not None:
            known |= {"config": config.content, "config_file": str(config.path)}
        return known
    if training.fsdp is None:
        return {}
    variables = {f"fsdp_{name}": launched.environment.get(f"FSDP_{name.upper()}") for name in _OPTIONS}
    section = {name: value for name, value in variables.items() if value is not None}
    return {"launcher": {"distributed_type": "FSDP", "fsdp_config": section}, "launcher_file": "accelerate launch"}


def _config_file(words: Sequence[str]) -> str:
    """The value of accelerate's `--config_file`; empty without it."""
    for number, word in enumerate(words):
        if _option(word) == "config_file":
            return word.partition("=")[2] or words[number + 1]
    return ""


def _option(word: str) -> str:
    """The name of an option, such as `config_file` of `--config-file=a.yaml`; empty for other words."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_") if word.startswith("--") else ""
