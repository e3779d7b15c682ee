"""TRL's SFTTrainer in a traced training: rows of tokens with labels, a tokenizer, and its fused head on a GPU.

It asks for a `datasets.Dataset` and a tokenizer, and pads or flattens rows itself. On a GPU its head runs Triton
kernels, which keep and make nothing that the Python around them does not allocate; where Triton is not installed, TRL
would take another path, whose tiles are larger. Every token has a label here: how many of a user's have none, which
the head leaves out, is not known.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hf_memkit.prediction.child.example_inputs import Behind, Rows
from hf_memkit.prediction.child.tracer.work_recorder import launched
from hf_memkit.setup.setup import Setup


def is_sft(setup: Setup) -> bool:
    """Whether the setup trains with TRL's SFTTrainer."""
    return bool(setup.get("trainer.class") == "trl:SFTTrainer")


def sft_rows(setup: Setup, row: dict[str, Any], batch_size: int, count: int) -> Rows:
    """`count` rows like `row`: of packed ones each holds two sequences, else the first of a batch is the longest."""
    tokens = row["input_ids"]
    row = {"input_ids": tokens, "labels": list(tokens)}
    if setup.get("arguments.packing"):
        half = max(1, len(tokens) // 2)
        return Rows({**row, "seq_lengths": [half, len(tokens) - half]}, count)
    return Rows(row, count, {name: values[:-1] for name, values in row.items()}, batch_size)


def as_dataset(rows: Rows | Behind) -> Any:
    """`rows` as SFTTrainer takes them."""
    from datasets import Dataset

    return Dataset.from_list([rows[number] for number in range(len(rows))])


def tokenizer() -> Any:
    """A tokenizer that knows its padding; nothing is read with it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def head_of_triton(kernels: Any) -> None:
    """Where Triton is not installed, TRL's head takes the path of a GPU with it all the same, and launches no kernel
    (trl 1.16.0: kernels/chunked_logprob.py). `kernels`: that module, before others import from it."""

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = f"triton.{name}"

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: launched(self.name, arguments)

    kernels._use_triton = lambda device: device.type == "cuda"
    for name in ("_forward_kernel", "_backward_kernel"):
        setattr(kernels, name, Kernel(name))
    kernels.triton = SimpleNamespace(cdiv=lambda size, block: -(-size // block))
