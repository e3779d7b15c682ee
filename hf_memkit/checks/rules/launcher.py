"""The YAML of `accelerate launch`: values that it refuses, keys that it does not read, and settings in two places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.library_versions import accelerate_keys, accelerate_options, accelerate_values
from hf_memkit.checks.accelerate_files import SECTION, own_engine, section
from hf_memkit.checks.rule import Match, any_job
from hf_memkit.checks.subject import Subject
from hf_memkit.common.errors import did_you_mean

_CONVERTED: Final = frozenset({"dynamo_backend", "fp16"})
"""Former keys that accelerate still reads (accelerate 1.15.0: commands/config/config_args.py, `process_config`)."""

_IN_THE_JSON: Final = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
"""Keys that may not stand beside a DeepSpeed JSON (accelerate 1.15.0: utils/dataclasses.py 1507-1532)."""

_JSON: Final = "deepspeed_config_file"

_PARALLELISM: Final = "parallelism_config"
_SIZES: Final = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


def _engine_section(subject: Subject) -> Mapping[str, Any]:
    """The YAML's section `deepspeed_config`; empty without one."""
    return section(subject.launcher or {}, SECTION)


@any_job.error(
    why="accelerate refuses a config with a key that it does not know",
    fix="rename or delete the key",
    source="accelerate 1.15.0: commands/config/config_args.py 153-159",
)
def accelerate_unknown_key(subject: Subject) -> Iterator[Match]:
    known = accelerate_keys() | _CONVERTED
    for key, value in (subject.launcher or {}).items() if accelerate_keys() else ():
        if key not in known:
            proposal = did_you_mean(str(key), known)
            fix = f"delete the key{proposal}" if proposal else ""
            if str(key).startswith("fsdp_"):
                fix = "write it below fsdp_config:, indented"
            yield Match(str(key), value, fix=fix, launcher=True)


@any_job.error(
    why="the launcher fails at this value",
    fix="write a value that it takes",
    source="accelerate 1.15.0: utils/dataclasses.py, `DistributedType`, `PrecisionType`; commands/launch.py",
)
def accelerate_wrong_value(subject: Subject) -> Iterator[Match]:
    content = subject.launcher or {}
    if content and "distributed_type" not in content:
        why = "the launcher refuses a config without distributed_type"
        yield Match("distributed_type", None, why=why, fix="add distributed_type: DEEPSPEED, FSDP, MULTI_GPU or NO",
                    launcher=True)  # fmt: skip
    kind = content.get("distributed_type", "NO")
    kinds = accelerate_values("DistributedType")
    if kinds and kind is not False and kind not in kinds:  # YAML takes a bare NO for false, which accelerate accepts
        proposal = did_you_mean(str(kind).upper(), kinds)
        yield Match("distributed_type", kind, fix=f"write one of {', '.join(kinds)}{proposal}", launcher=True)
    precision = content.get("mixed_precision")
    precisions = accelerate_values("PrecisionType")
    if precision is False:
        why = "YAML takes a bare no for false, at which the launcher fails"
        yield Match("mixed_precision", precision, why=why, fix="write 'no', in quotes", launcher=True)
    elif precisions and precision is not None and str(precision).lower() not in precisions:
        yield Match("mixed_precision", precision, fix=f"write one of {', '.join(precisions)}", launcher=True)
    if content.get(SECTION) is not None and not isinstance(content[SECTION], Mapping):
        yield Match(SECTION, content[SECTION], fix="write its keys below it, indented", launcher=True)
    for name in ("num_processes", "num_machines"):
        number = content.get(name)
        if number is not None and not str(number).lstrip("-").isdigit():
            yield Match(name, number, fix="write a whole number", launcher=True)


@any_job.hint(
    why="without it the launcher looks for the first machine under the name None, and the machines never meet",
    fix="add main_process_ip, the address of the machine with machine_rank 0, or start with --main_process_ip",
    source="accelerate 1.15.0: utils/launch.py 212-224, 484-496",
)
def accelerate_main_process_ip(subject: Subject) -> Iterator[Match]:
    """DeepSpeed's own launchers read a hostfile instead."""
    content = subject.launcher or {}
    machines, multinode = content.get("num_machines"), _engine_section(subject).get("deepspeed_multinode_launcher")
    by_hostfile = own_engine(content) == "DEEPSPEED" and multinode != "standard"
    if isinstance(machines, int) and machines > 1 and not by_hostfile and content.get("main_process_ip") is None:
        yield Match("main_process_ip", None, launcher=True)


@any_job.error(
    why="there is no such file: the training fails before its model is loaded",
    fix="correct the path",
    source="accelerate 1.15.0: utils/deepspeed.py, `HfDeepSpeedConfig`",
)
def accelerate_json_missing(subject: Subject) -> Iterator[Match]:
    named = _engine_section(subject).get(_JSON)
    if own_engine(subject.launcher or {}) != "DEEPSPEED" or named in (None, "none") or not subject.launcher_file:
        return
    folder = Path(subject.launcher_file).parent
    if not any((place / str(named)).is_file() for place in (Path(), folder)):
        yield Match(f"{SECTION}.{_JSON}", named, launcher=True)


@any_job.warning(
    why="the launcher passes it on to nobody: the key has no effect",
    fix="delete the key, or set it in a DeepSpeed JSON (deepspeed_config_file)",
    source="accelerate 1.15.0: utils/launch.py 431-597; utils/dataclasses.py 1226-1325",
)
def accelerate_key_unread(subject: Subject) -> Iterator[Match]:
    known = accelerate_options("prepare_deepspeed_cmd_env")
    for key, value in _engine_section(subject).items() if known else ():
        if key not in known and not key.endswith("_nvme_path"):
            proposal = did_you_mean(str(key), known)
            fix = "" if not proposal else f"delete the key{proposal}"
            yield Match(f"{SECTION}.{key}", value, fix=fix, launcher=True)


@any_job.error(
    why="the launcher passes no folder on: DeepSpeed swaps to a folder named none, below the working directory",
    fix="set device and nvme_path in a DeepSpeed JSON (deepspeed_config_file)",
    source="accelerate 1.15.0: utils/launch.py 431-597; utils/dataclasses.py 1226-1325",
)
def accelerate_nvme_path(subject: Subject) -> Iterator[Match]:
    section = _engine_section(subject)
    for key in ("offload_optimizer_device", "offload_param_device"):
        if section.get(key) == "nvme" and not section.get(_JSON) and own_engine(subject.launcher or {}) == "DEEPSPEED":
            yield Match(f"{SECTION}.{key}", "nvme", launcher=True)


@any_job.warning(
    why="it has no effect: the launcher chooses the engine only by distributed_type",
    fix="set distributed_type, or delete the section",
    source="accelerate 1.15.0: commands/launch.py, `_validate_launch_command`",
)
def accelerate_engine_not_chosen(subject: Subject) -> Iterator[Match]:
    content = subject.launcher or {}
    for name, engine in ((SECTION, "DEEPSPEED"), ("fsdp_config", "FSDP")):
        if section(content, name) and own_engine(content) != engine:
            fix = f"set distributed_type: {engine}, or delete the section"
            yield Match(name, section(content, name), fix=fix, launcher=True)


@any_job.warning(
    why="the precision of Trainer's arguments takes precedence over the launcher's",
    fix="delete it, or set the precision in the arguments",
    source="transformers 5.23.0: training_args.py 1614-1618; trainer.py 744",
)
def accelerate_precision_overruled(subject: Subject) -> Iterator[Match]:
    launched = str((subject.launcher or {}).get("mixed_precision") or "no").lower()
    trained = next((name for name in ("bf16", "fp16") if subject.on(name)), "")
    if launched not in ("no", "false") and trained and launched != trained:
        why = f"Trainer's {trained}: true takes precedence: the training runs in {trained}"
        fix = f"write mixed_precision: {trained}, or delete {trained} in the arguments"
        yield Match("mixed_precision", launched, why=why, fix=fix, launcher=True)


@any_job.error(
    why="accelerate fails: beside a DeepSpeed JSON this key is not allowed",
    fix="delete the key, and set it in the JSON",
    source="accelerate 1.15.0: utils/dataclasses.py 1507-1532",
)
def accelerate_key_beside_json(subject: Subject) -> Iterator[Match]:
    launcher = subject.launcher or {}
    section = _engine_section(subject)
    if own_engine(launcher) != "DEEPSPEED" or not (section.get(_JSON) or subject.argument("deepspeed")):
        return
    for key in _IN_THE_JSON:
        if key in section:
            yield Match(f"{SECTION}.{key}", section[key], launcher=True)
    if launcher.get("mixed_precision") is not None:
        yield Match("mixed_precision", launcher["mixed_precision"], launcher=True)


@any_job.error(
    why="accelerate refuses sizes whose product is not the number of processes",
    fix="change one of the sizes",
    source="accelerate 1.15.0: parallelism_config.py 367-392",
)
def parallelism_sizes(subject: Subject) -> Iterator[Match]:
    """Also if FSDP has no size above 1 by which it could shard weights."""
    launcher = subject.launcher or {}
    given = section(launcher, _PARALLELISM)
    sizes = {name: given.get(f"{_PARALLELISM}_{name}", 1) for name in _SIZES}
    processes = launcher.get("num_processes")
    if not all(isinstance(size, int) for size in sizes.values()) or sizes["sp_size"] != 1:
        return
    total = math.prod(sizes.values())
    if total == 1:  # any number of processes
        return
    if isinstance(processes, int) and total != processes:
        why = f"the product of its sizes is {total}, and num_processes is {processes}: accelerate refuses that"
        fix = f"write num_processes: {total}, or other sizes"
        yield Match(_PARALLELISM, given, why=why, fix=fix, launcher=True)
    elif own_engine(launcher) == "FSDP" and sizes["dp_shard_size"] == sizes["cp_size"] == 1:
        why = "FSDP has no size by which it shards weights: accelerate refuses that"
        fix = f"set {_PARALLELISM}_dp_shard_size or {_PARALLELISM}_cp_size above 1"
        yield Match(_PARALLELISM, given, why=why, fix=fix, launcher=True)
