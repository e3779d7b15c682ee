"""Trains under a live DeepSpeed engine on the CPU, in this process or in each process of a launcher, and writes the
peaks of the engine's phases.

What counts are the tensors that torch's operations make (`StorageTracer`, on real ones). Torch's profiler is no
measure here: gloo frees in separate threads, which it does not see, so that its figures differ by up to a tenth from
run to run, and gloo copies as no GPU's library does.

    python -m tests.prediction.split_states_child FOLDER     # FOLDER/cases.json: {name: {"setup", "sequence_length"}}
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")

from hf_memkit.setup.process_group import single_process_environment

os.environ.update(single_process_environment())

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
from transformers.utils import logging

from hf_memkit.common.terms import Phase
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.setup.process_group import join_process_group, leave_process_group
from hf_memkit.setup.setup import Setup
from tests.prediction import fake_and_real

RANK = int(os.environ["RANK"])


class Marks(TrainerCallback):  # type: ignore[misc]
    """Tells the tracer where a phase ends: those of the engine, which steps inside `backward`."""

    def __init__(self, tracer: StorageTracer) -> None:
        self.tracer = tracer
        self.trainer: Any = None
        self.phase: Phase = "load"

    def move_to(self, phase: Phase) -> None:
        gc.collect()  # an engine's cycles
        self.tracer.end_phase(self.phase)
        self.phase = phase

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        engine = self.trainer.deepspeed
        engine.register_forward_pre_hook(lambda *_: self.move_to("forward"))
        backward, step = engine.backward, engine.optimizer.step

        def marked_backward(*arguments: Any, **options: Any) -> Any:
            self.move_to("backward")
            return backward(*arguments, **options)

        def marked_step(*arguments: Any, **options: Any) -> Any:
            self.move_to("optimizer")
            try:
                return step(*arguments, **options)
            finally:
                self.move_to("data")

        engine.backward, engine.optimizer.step = marked_backward, marked_step

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.move_to("data")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.move_to("save")


def measured(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The most live bytes of each phase."""
    setup, length = Setup.from_json(asked["setup"]), asked["sequence_length"]
    with StorageTracer("cpu") as tracer:
        train(setup, length, folder, Marks(tracer))
        return fake_and_real._named(fake_and_real.peaks(fake_and_real._changes(tracer.finish("data"))))


def train(setup: Setup, sequence_length: int, folder: Path, marks: Marks) -> None:
    from deepspeed.runtime.zero.partition_parameters import Init
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_memkit.prediction.child.example_inputs import Rows

    given = {key: value for key, value in setup.section("arguments").items() if key != "optim"}
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), deepspeed=setup["deepspeed.config"], use_cpu=True, max_steps=3, report_to=[],
        disable_tqdm=True, save_strategy="no", logging_strategy="no", dataloader_pin_memory=False, **given,
    )  # fmt: skip
    join_process_group(arguments)
    values = dict(setup["model.architecture"])
    dtype = torch.bfloat16 if given.get("bf16") else torch.float32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values), dtype=dtype)
    tokens = torch.ones(sequence_length, dtype=torch.int64)
    rows = Rows({"input_ids": tokens, "labels": tokens}, 256)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[marks]
    )
    marks.trainer = trainer
    del model
    trainer.train()
    trainer.deepspeed.destroy()
    Init.param_id = 0  # as in a new process
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()


def main(folder: Path) -> None:
    gc.disable()  # left alone it runs when it likes, and cycles live for chance stretches
    gc.freeze()  # the libraries' own objects need not be looked through each time
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    for name, asked in json.loads((folder / "cases.json").read_text()).items():
        place = folder / name
        place.mkdir(exist_ok=True)
        found = measured(asked, place)
        gc.collect()  # what is left of an engine
        (place / f"rank{RANK}.json").write_text(json.dumps(found))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
