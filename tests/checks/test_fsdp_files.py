"""Files with settings of FSDP: a JSON, arguments that name it, and accelerate's YAML, alone and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hf_memkit.catalog.models import describe
from hf_memkit.checks import check_file
from hf_memkit.common.errors import InputError

JSON: Final = {
    "fsdp_transformer_layer_cls_to_wrap": ["GPT2Block"],
    "fsdp_offload_params": True,
    "state_dict_type": "LOCAL_STATE_DICT",
}
YAML: Final[dict[str, Any]] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4,
}  # fmt: skip


def problems(file: Path, args: Path | None = None, **known: Any) -> set[tuple[str, str, str, str]]:
    return {
        (each.rule, each.severity, Path(each.file).name if each.file else "", each.key)
        for each in check_file(file, args, **known)
    }


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content))
    return path


OF_THE_JSON: Final = {
    ("fsdp-key-unread", "warning", "fsdp.json", "fsdp_offload_params"),
    ("fsdp-wrong-value", "error", "fsdp.json", "state_dict_type"),
}


def test_the_json_is_checked_alone_named_by_arguments_and_beside_them(tmp_path: Path) -> None:
    settings = written(tmp_path / "fsdp.json", JSON)
    assert problems(settings) == OF_THE_JSON
    naming = written(tmp_path / "args.yaml", {"output_dir": "x", "fsdp": True, "fsdp_config": "fsdp.json"})
    assert problems(naming) == OF_THE_JSON
    beside = written(tmp_path / "beside.yaml", {"output_dir": "x", "fsdp": True, "optim": "adamw_bnb_8bit"})
    assert problems(settings, beside) == OF_THE_JSON | {("fsdp-optimizer", "error", "beside.yaml", "optim")}
    without = written(tmp_path / "without.yaml", {"output_dir": "x"})
    assert problems(settings, without) == {("fsdp-config-without-fsdp", "warning", "without.yaml", "fsdp_config")}
    assert not problems(written(tmp_path / "short.json", {"version": 2, "activation_checkpointing": True}))
    with pytest.raises(InputError, match="is a JSON of fsdp_config"):
        check_file(naming, settings)


def test_the_yaml_and_arguments_are_one_job(tmp_path: Path) -> None:
    section = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    section |= {"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_activation_checkpointing": True}
    launch = written(tmp_path / "acc.yaml", {**YAML, "fsdp_config": section})
    right = written(tmp_path / "right.yaml", {"output_dir": "x", "bf16": True, "optim": "adamw_torch_fused"})
    assert problems(launch) == problems(launch, right) == set()
    wrong = {"output_dir": "x", "fp16": True, "optim": "paged_adamw_8bit", "gradient_checkpointing": True}
    assert problems(launch, written(tmp_path / "wrong.yaml", wrong)) == {
        ("checkpointing-and-fsdp", "error", "wrong.yaml", "gradient_checkpointing"),
        ("fsdp-optimizer", "error", "wrong.yaml", "optim"),
        ("accelerate-precision-overruled", "warning", "acc.yaml", "mixed_precision"),
    }


def test_a_yaml_of_an_older_version(tmp_path: Path) -> None:
    section = {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False, "fsdp_offload_params": True, "fsdp_sharding_strategy": 1,
        "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_use_orig_params": True,
    }  # fmt: skip
    assert problems(written(tmp_path / "acc.yaml", {**YAML, "fsdp_config": section})) == {
        ("fsdp-key-unread", "warning", "acc.yaml", "fsdp_config.fsdp_backward_prefetch_policy"),
        ("fsdp-deprecated", "hint", "acc.yaml", "fsdp_config.fsdp_version"),
    }
    second = {**section, "fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    assert problems(written(tmp_path / "acc.yaml", {**YAML, "fsdp_config": second})) == {
        ("fsdp-key-unread", "warning", "acc.yaml", "fsdp_config.fsdp_backward_prefetch_policy"),
        ("fsdp-key-unread", "warning", "acc.yaml", "fsdp_config.fsdp_sharding_strategy"),
        ("fsdp-key-unread", "hint", "acc.yaml", "fsdp_config.fsdp_forward_prefetch"),
        ("fsdp-key-unread", "hint", "acc.yaml", "fsdp_config.fsdp_use_orig_params"),
    }


def test_the_class_is_compared_with_the_model(tmp_path: Path) -> None:
    model = describe("gpt2-xl", use_hub=False, use_built_in=True)
    arguments = {"output_dir": "x", "fsdp": "full_shard auto_wrap"}
    deprecated = ("fsdp-deprecated", "hint", "args.json", "fsdp")
    assert problems(written(tmp_path / "args.json", arguments), model=model) == {deprecated}
    arguments["fsdp_config"] = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}  # type: ignore[assignment]
    path = written(tmp_path / "args.json", arguments)
    wrong = ("fsdp-wrap-class", "error", "args.json", "fsdp_config.transformer_layer_cls_to_wrap")
    assert problems(path, model=model) == {deprecated, wrong}
    assert problems(path) == {deprecated}


def test_a_problem_has_the_name_that_the_user_wrote(tmp_path: Path) -> None:
    """Defect: the message names a key that is not in the file."""
    (tmp_path / "fsdp.json").write_text('{"activation_checkpointing": true, "version": 2}')
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        (tmp_path / "args.yaml").write_text(f"output_dir: out\n{name}: true\nfsdp: true\nfsdp_config: fsdp.json\n")
        (problem,) = [each for each in check_file(tmp_path / "args.yaml") if each.rule == "checkpointing-and-fsdp"]
        assert problem.key == name
        assert f"{name}: false in the arguments" in problem.fix and "fsdp.json" in problem.fix
