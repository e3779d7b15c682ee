"""TRL's SFTTrainer: its rows (a `datasets.Dataset`), a tokenizer, and its fused head on a GPU.

The head runs Triton kernels, which allocate nothing themselves; without Triton, TRL would use other code with larger
tiles. All tokens have a label here, because the user's number of tokens without one is unknown.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.utils.data import ConcatDataset

from hf_memkit.prediction.child.example_inputs import Rows
from hf_memkit.prediction.child.tracer.work_recorder import launched
from hf_memkit.setup.setup import Setup


def is_sft(setup: Setup) -> bool:
    """Whether the setup trains with TRL's SFTTrainer."""
    return bool(setup.get("trainer.class") == "trl:SFTTrainer")


def sft_rows(setup: Setup, row: dict[str, Any], batch_size: int, count: int) -> Rows:
    """`count` rows like `row`: packed ones hold two sequences, else the first row of a batch is the longest."""
    tokens = row["input_ids"]
    row = {"input_ids": tokens, "labels": list(tokens)}
    if setup.get("arguments.packing"):
        half = max(1, len(tokens) // 2)
        return Rows({**row, "seq_lengths": [half, len(tokens) - half]}, count)
    return Rows(row, count, {name: values[:-1] for name, values in row.items()}, batch_size)


def as_dataset(rows: Rows | ConcatDataset[Any]) -> Any:
    """`rows` in the form that SFTTrainer accepts."""
    from datasets import Dataset

    return Dataset.from_list([rows[number] for number in range(len(rows))])


def tokenizer() -> Any:
    """A tokenizer with a padding token; nothing is tokenized with it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def why_not_padding_free(trainer: Any) -> str:
    """Why `padding_free=True` has no effect here, or empty (trl 1.16.0: sft_trainer.py, `SFTTrainer.__init__`)."""
    if not hasattr(trainer, "padding_free"):
        if hasattr(trainer.args, "padding_free"):
            return f"only SFTTrainer is supported, and this is {type(trainer).__name__}"
        return "it needs a change of the script: data_collator=DataCollatorWithFlattening(), with flash attention"
    if not type(trainer.data_collator).__module__.startswith("trl."):
        return "TRL refuses it with the script's own data_collator"
    if trainer.compute_metrics is not None:
        return "compute_metrics would get the rows of a batch as one row"
    return ""


def padding_free_change(trainer: Any, longest: int | None, attention: str) -> str:
    """The settings for padding-free rows; empty if TRL refuses them. `longest`: tokens of the longest row. TRL refuses
    `padding_free` with `max_length`, and cuts no rows without it (trl 1.16.0: sft_trainer.py,
    `SFTTrainer.__init__`)."""
    arguments, flash = trainer.args, f'attn_implementation="{attention}"'
    if not hasattr(arguments, "padding_free"):
        return f"data_collator=DataCollatorWithFlattening() and {flash}"
    if why_not_padding_free(trainer):
        return ""
    cut_at = None if getattr(arguments, "packing", False) else getattr(arguments, "max_length", None)
    if cut_at is None:
        return f"padding_free=True and {flash}"
    if (longest or 0) < cut_at or getattr(trainer, "_skip_prepare_dataset", False):
        return f"padding_free=True, max_length=None and {flash}"
    return f"padding_free=True, max_length=None, rows cut to {cut_at:,} tokens where they are tokenised, and {flash}"


def patch_fused_head(kernels: Any) -> None:
    """Makes TRL's head use the code for a GPU with Triton, without launching kernels, if Triton is not installed (trl
    1.16.0: kernels/chunked_logprob.py). `kernels`: that module, before others import from it."""

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = f"triton.{name}"

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: launched(self.name, arguments)

    kernels._use_triton = lambda device: device.type == "cuda"
    for name in ("_forward_kernel", "_backward_kernel"):
        setattr(kernels, name, Kernel(name))
    kernels.triton = SimpleNamespace(cdiv=lambda size, block: -(-size // block))
