"""Argument files as they are in use, and right: nothing is said of them; and one mistake is said once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hf_memkit.check import check_file

RIGHT = {
    "lora by a script of one's own": """
        output_dir: out
        torch_dtype: bfloat16
        bf16: true
        use_lora: true
        lora_r: 8
        gradient_checkpointing: true
        gradient_checkpointing_kwargs: {use_reentrant: true}
        max_seq_length: 1024
    """,
    "lora by TRL, whose switch is on by default": """
        output_dir: out
        model_name_or_path: Qwen/Qwen3-0.6B
        dtype: bfloat16
        use_peft: true
        lora_r: 16
        dataset_text_field: text
        max_length: 1024
        gradient_checkpointing_kwargs: {use_reentrant: false}
    """,
    "16-bit weights under FSDP": """
        output_dir: out
        torch_dtype: bfloat16
        bf16: true
        block_size: 1024
        fsdp: true
        fsdp_config: {transformer_layer_cls_to_wrap: [LlamaDecoderLayer]}
    """,
    "Kahan summation": "{output_dir: out, torch_dtype: bfloat16, optim: stable_adamw, learning_rate: 2.0e-5}",
    "plain SGD": "{output_dir: out, optim: sgd, learning_rate: 0.1}",
    "an evaluation alone": "{output_dir: out, do_eval: true, bf16_full_eval: true}",
}


def said(folder: Path, text: str) -> list[tuple[str, str, str]]:
    """(rule, key, fix) of each problem."""
    path = folder / "args.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(text)))
    return [(one.rule, one.key, one.fix) for one in check_file(path)]


@pytest.mark.parametrize("text", RIGHT.values(), ids=list(RIGHT))
def test_nothing_is_said_of_a_file_that_is_right(tmp_path: Path, text: str) -> None:
    assert said(tmp_path, text) == []


def test_full_evaluation_is_named_once(tmp_path: Path) -> None:
    text = "{output_dir: out, do_train: true, eval_strategy: steps, bf16: true, bf16_full_eval: true}"
    assert [key for _, key, _ in said(tmp_path, text)] == ["bf16_full_eval"]


def test_an_old_argument_that_is_off_is_to_be_deleted(tmp_path: Path) -> None:
    ((rule, _, off),) = said(tmp_path, "{output_dir: out, group_by_length: false}")
    ((_, _, on),) = said(tmp_path, "{output_dir: out, group_by_length: true}")
    assert rule == "argument-of-transformers-4" and off == "delete the key" and "train_sampling_strategy" in on


@pytest.mark.parametrize("off", ["{output_dir: out, dtype: bfloat16}", "{output_dir: out, torch_dtype: bfloat16}"])
def test_what_a_file_cannot_show_is_said(tmp_path: Path, off: str) -> None:
    path = tmp_path / "args.yaml"
    path.write_text(off)
    (problem,) = check_file(path)
    assert problem.rule == "bf16-weights-lose-updates" and "accelerate's own config" in problem.why
