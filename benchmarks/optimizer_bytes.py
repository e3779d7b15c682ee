"""What real optimizers hold, in bytes: `python -m benchmarks.optimizer_bytes [--out FILE]`.

Each technique's own settings go into a real Trainer, which trains one step of a model with random weights; then its
optimizer's tensors are counted, those inside quantised ones and projectors included, and compared with what
`hf_memkit.setup.techniques.setup_ledger` says. Gradients are counted whenever a new one arrives.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers import set_seed as set_all_seeds

from hf_memkit.catalog.hardware import Machine
from hf_memkit.catalog.models import describe
from hf_memkit.setup.build import optimizer_class_and_options
from hf_memkit.setup.job import Job
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES
from hf_memkit.setup.techniques.setup_ledger import gradient_bytes, states_of

OUT: Final = Path(__file__).parent / "results" / "optimizer_bytes.json"
SHARED_TABLES: Final = ("qmap1", "qmap2")
"""bitsandbytes keeps one table of 256 numbers for all signed states and one for all others: 2 KiB in all."""

GPT2: Final = {"model_type": "gpt2", "n_embd": 768, "n_layer": 2, "n_head": 12, "n_positions": 1024,
               "vocab_size": 50257}  # fmt: skip
LLAMA: Final = {"model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 2,
                "num_attention_heads": 12, "vocab_size": 32000}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Bytes after one step, and as computed.

    Attributes:
        states, states_computed: of the optimizer. Single numbers (step counts, norms) and bitsandbytes' two shared
            tables are left out.
        gradients, gradients_computed: the most that lived at once.
        parameters: that are trained.
    """

    states: int
    states_computed: int
    gradients: int
    gradients_computed: int
    parameters: int


def make_setup(name: str, architecture: dict[str, Any], dtype: str, **values: Any) -> Setup:
    """The technique's own settings for a model of this architecture; what only compiles faster code is left out."""
    facts = describe(architecture["model_type"], architecture=architecture, use_hub=False)
    machine = Machine(None, ram_bytes=1 << 36, disk_free_bytes=1 << 36, disk_path="/", cpu_count=2)
    job = Job(facts, machine, 1, 8, "/tmp", values)
    setup = TECHNIQUES[name](Setup(preset=name, job=job).put("model.dtype", dtype, "as measured"))
    low_bit = "low_bit" in str(setup.get("optimizer.class"))
    return setup.put("optimizer.compiled", False, "no compiler here") if low_bit else setup


def make_trainer(setup: Setup, architecture: dict[str, Any], *, steps: int = 1, **arguments: Any) -> Trainer:
    """A Trainer with the setup's arguments and optimizer, over a model with the same random weights each time."""
    for name, value in arguments.items():  # an optimizer class is given its learning rate from the setup
        setup = setup.put(f"arguments.{name}", value, "as measured")
    set_all_seeds(0)
    values = dict(architecture)
    config = AutoConfig.for_model(values.pop("model_type"), bos_token_id=0, eos_token_id=0, **values)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, setup.get("model.dtype", "float32")))
    multiple = setup.get("model.pad_vocabulary_to_multiple_of")
    if multiple:
        model.resize_token_embeddings(pad_to_multiple_of=multiple)
    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "per_device_train_batch_size": 2, "max_steps": steps, "logging_steps": 1, "seed": 0,
    }  # fmt: skip
    tokens = torch.randint(0, values["vocab_size"], (8, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row.clone()} for row in tokens]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**{**options, **setup.arguments}),
        train_dataset=rows,
        optimizer_cls_and_kwargs=optimizer_class_and_options(setup),
    )
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


def state_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Every tensor that an optimizer holds for its parameters, whatever it hides it in."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for one in getattr(optimizer, "optimizer_dict", None) or ():  # Trainer's layer-wise forms: one a parameter
        yield from state_tensors(optimizer.optimizer_dict[one])
    for name in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"):  # AdaLomo
        yield from getattr(optimizer, name, {}).values()
    for state in optimizer.state.values():
        for name, value in state.items():
            if name not in SHARED_TABLES:
                yield from _inside(value)


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(getattr(value, "ortho_matrix", None), Tensor):  # GaLore's and APOLLO's projectors
        yield value.ortho_matrix
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        yield from (getattr(value, name) for name in names)
    elif isinstance(value, Tensor) and value.numel() > 1:
        yield value


def measure(setup: Setup, architecture: dict[str, Any], **arguments: Any) -> Measured:
    """Trains one step, and counts."""
    _forget_overrides()
    trainer = make_trainer(setup, architecture, **arguments)
    parameters = [one for one in trainer.model.parameters() if one.requires_grad]
    most = 0

    def look(new: Tensor) -> None:
        nonlocal most
        held = sum(one.grad.nbytes for one in parameters if one.grad is not None)
        most = max(most, held + new.nbytes)

    for one in parameters:
        one.register_hook(look)
    trainer.train()
    held = {one.data_ptr(): one.nbytes for one in state_tensors(trainer.optimizer)}
    facts = describe(architecture["model_type"], architecture=architecture, use_hub=False)
    return Measured(
        sum(held.values()), states_of(setup, facts).total, most, gradient_bytes(setup, facts)[0],
        sum(one.numel() for one in parameters),
    )  # fmt: skip


def _forget_overrides() -> None:
    """bitsandbytes remembers by position which parameters keep 32 bits, for the whole process: another model's first
    parameters would keep them too (bitsandbytes 0.50.2: optim/optimizer.py, `GlobalOptimManager.index2config`)."""
    from bitsandbytes.optim import GlobalOptimManager

    GlobalOptimManager.get_instance().initialize()


def cuda_does_nothing() -> None:
    """lomo-optim 0.1.1, adalomo.py 92-101, calls `.cuda()` on its states wherever it runs. In this process only."""
    torch.Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(argv)
    cuda_does_nothing()
    warnings.filterwarnings("ignore")
    rows = []
    for name in [name for name, one in TECHNIQUES.items() if one.family == "optimizers"]:
        architecture = LLAMA if name.startswith(("galore", "apollo")) else GPT2
        for dtype in ("float32", "bfloat16"):
            got = measure(make_setup(name, architecture, dtype), architecture)
            rows.append({
                "technique": name, "model": architecture["model_type"], "weights": dtype,
                "parameters": got.parameters, "state_bytes": got.states, "state_bytes_computed": got.states_computed,
                "state_bytes_a_parameter": round(got.states / got.parameters, 4),
                "gradient_bytes": got.gradients, "gradient_bytes_computed": got.gradients_computed,
            })  # fmt: skip
            print(rows[-1], flush=True)
    packages = ("torch", "transformers", "bitsandbytes", "torchao", "galore-torch", "apollo-torch", "lomo-optim")
    content = {
        "schema": 1, "benchmark": "optimizer_bytes", "device": "cpu", "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "models": {"gpt2": GPT2, "llama": LLAMA}, "rows": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
