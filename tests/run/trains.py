"""A user's script with Trainers, which prints what a test asks about as JSON. Run as a script, and by launchers.

python trains.py HOW OUT [DEEPSPEED_JSON or ACCUMULATION]
"""

import inspect
import json
import os
import sys
from pathlib import Path

os.environ["HF_HOME"] = str(Path("a home of the script's own").absolute())  # read when huggingface_hub is imported

import huggingface_hub.constants
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

OOM = "CUDA out of memory. Tried to allocate 2.34 GiB. GPU 0 has a total capacity of 15.77 GiB of which 0 is free."
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Fails(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.transformer.h[0].mlp.forward = self.fails

    def fails(self, *args):
        raise torch.OutOfMemoryError(OOM)


class OwnTrainer(Trainer):
    """As people write them: with an `__init__` and its own method."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made = True


def arguments(folder, **more):
    return TrainingArguments(
        folder, use_cpu=True, max_steps=3, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        per_device_train_batch_size=2, **more,
    )  # fmt: skip


def new_trainer(given, kind=Trainer, callbacks=()):
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    rows = [torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(n)) for n in range(64)]
    data = [{"input_ids": row, "labels": row.clone()} for row in rows]
    return kind(GPT2LMHeadModel(config), given, train_dataset=data, callbacks=list(callbacks))


def losses(trainer):
    trainer.train()
    return [entry["loss"].hex() for entry in trainer.state.log_history if "loss" in entry]


def main():
    words = [each for each in sys.argv[1:] if not each.startswith("--local_rank=")]  # by DeepSpeed's launcher
    how, out = words[:2]
    record = {"home": huggingface_hub.constants.HF_HOME}
    if how == "oom":
        new_trainer(arguments(out), callbacks=[Fails()]).train()
    elif how == "long":
        given = arguments(out)
        given.max_steps = 100_000
        new_trainer(given).train()
    elif how == "deepspeed":
        given = arguments(out, deepspeed=words[2])
        record["environment"] = {name: os.environ.get(name) for name in LAUNCHER}
        if len(words) == 3:
            record["losses"] = losses(new_trainer(given))
    elif how == "ranks":
        record["losses"] = losses(new_trainer(arguments(out, gradient_accumulation_steps=int([*words, 1][2]))))
    else:
        from hf_memkit import MemoryReportCallback

        own, later = (
            MemoryReportCallback(f"{out}/{name}", summary=False, log="none", html=name == "own")
            for name in ("own", "own too")
        )
        trainers = [
            new_trainer(arguments(f"{out}/first")),
            new_trainer(arguments(f"{out}/second"), OwnTrainer),
            new_trainer(arguments(f"{out}/third"), callbacks=[own]),
            new_trainer(arguments(f"{out}/fourth")),
        ]
        trainers[3].add_callback(later)
        record["losses"] = [losses(trainer) for trainer in trainers]
        record["drawn afterwards"] = torch.rand(1).item().hex()
        record["launcher"] = [name for name in LAUNCHER if name in os.environ]
        record["signature"] = list(inspect.signature(Trainer.__init__).parameters)
    Path(f"{out}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(record))
    if torch.distributed.is_initialized():
        # Else, and after torch's own destroy_process_group, a thread of gloo's aborts the process now and then.
        from hf_memkit.setup.process_group import leave_process_group

        leave_process_group()


if __name__ == "__main__":
    main()
