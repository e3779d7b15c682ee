"""The measured process of section `techniques`: trains a case, and writes its losses and what no record says."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
from pathlib import Path
from typing import Any, Final

from benchmarks.techniques_cases import MODELS, Case, Size
from hf_memkit.architectures import ARCHITECTURES
from hf_memkit.units import GIB

VOCABULARY: Final = 500  # tokens of the tokenizer trained on the text; every model has more
LEARNING_RATE: Final = 3e-4
EVALUATED: Final = 32  # sequences
SHORTEST: Final = 16  # tokens, of sequences of unequal lengths


def write_model(name: str, folder: str, device: str) -> None:
    """Random weights in fp32, a tokenizer and the text's tokens, in a folder that is whole or not there."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    on_cpu = device == "cpu"
    size, target = MODELS[name], Path(folder)
    values = {**ARCHITECTURES[size.hub_id].config, **(size.rehearsed if on_cpu else {})}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, 0)
    torch.manual_seed(0)
    with torch.device("cpu" if on_cpu else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(str(temporary))
    tokenizer, tokens = tokenize()
    tokenizer.save_pretrained(str(temporary))
    np.save(temporary / "tokens.npy", np.array(tokens, dtype=np.int64))
    temporary.rename(target)


def tokenize() -> tuple[Any, list[int]]:
    """A small tokenizer trained on the text of Python's own help, and that text's tokens."""
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    texts = [text for _, text in sorted(topics.items())]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<|pad|>"], show_progress=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<|pad|>", eos_token="<|pad|>")
    return wrapped, [token for text in texts for token in bpe.encode(text).ids]


def run(case: Case, size: Size, folder: Path, job: dict[str, Any]) -> int:
    """Trains as the case says, from the weights in `job["model"]`; a case that runs out of memory raises.

    `result.json` then holds `losses` (one a step), `optimizer_class`, `host_peak_gib`, for sequences of unequal
    lengths `tokens_per_s` without padding, or `refused`: why memkit would not run this.
    """
    import torch
    from transformers import AutoTokenizer, Trainer
    from transformers.trainer_utils import set_seed

    from hf_memkit import train
    from hf_memkit.callback import attach
    from hf_memkit.errors import MemkitError
    from hf_memkit.setup import Setup

    on_cpu: bool = job["on_cpu"]
    if case.cap_gib is not None and not on_cpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.cap_gib * GIB / total))
    setup = Setup.from_json(job["setup"])
    try:
        train.require_packages(setup)
        arguments = train.build_arguments(setup, own_arguments(case, size, folder, job, setup))
        set_seed(arguments.seed)
        model = train.build_model(setup, print)
        train.install_model_parts(model, setup)
        tokenizer = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
        rows = sequences(case, size, job)
        options = train.trainer_options(setup, model=model, arguments=arguments, processing_class=tokenizer)
    except MemkitError as error:
        return write(folder, {"refused": str(error)})
    options = {**own_options(case, tokenizer), **options}
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:EVALUATED], **options)
    attach(trainer, output_dir=folder, summary=False, html=False)
    trainer.train()
    evaluated = trainer.evaluate() if case.evaluates else {}
    return write(folder, {**result(trainer, case, folder), **({"evaluated": evaluated} if evaluated else {})})


def own_arguments(case: Case, size: Size, folder: Path, job: dict[str, Any], setup: Any) -> dict[str, Any]:
    """The case's arguments that are no technique's; what a technique sets stays."""
    micro_batch = size.micro_batch(on_cpu=job["on_cpu"])
    wanted = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": size.accumulation,
        "per_device_eval_batch_size": micro_batch,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "include_num_input_tokens_seen": "non_padding" if case.data == "unequal" else "no",
        "dataloader_pin_memory": not job["on_cpu"],
    }
    return {name: value for name, value in wanted.items() if f"arguments.{name}" not in setup} | {
        "output_dir": str(folder / "run"), "max_steps": job["max_steps"], "use_cpu": job["on_cpu"], "seed": 0,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


def sequences(case: Case, size: Size, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of consecutive tokens, the same for every case of a model and kind of data.

    Unequal lengths are drawn so that half of the sequences are shorter than a quarter of the longest.
    """
    import numpy as np
    import torch

    micro_batch, longest = size.micro_batch(on_cpu=job["on_cpu"]), size.length(on_cpu=job["on_cpu"])
    tokens = np.load(Path(job["model"]) / "tokens.npy")
    count = max(EVALUATED, micro_batch * size.accumulation * job["max_steps"])
    if case.data == "equal":
        rows = np.resize(tokens, (count, longest))
        return [{"input_ids": (row := torch.from_numpy(each.copy())), "labels": row} for each in rows]
    drawn = np.random.default_rng(0).exponential(longest / 3, count)
    lengths = np.clip(drawn, SHORTEST, longest).astype(int)
    start = np.concatenate([[0], np.cumsum(lengths)])
    endless = np.resize(tokens, int(start[-1]))
    return [{"input_ids": endless[a:b].tolist()} for a, b in itertools.pairwise(start)]


def own_options(case: Case, tokenizer: Any) -> dict[str, Any]:
    """What Trainer is given where no technique brings it: a padding collator, and a metric that reads logits."""
    from transformers import DataCollatorForLanguageModeling

    options: dict[str, Any] = {"compute_metrics": accuracy} if case.evaluates else {}
    if case.data == "unequal":
        options["data_collator"] = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return options


def accuracy(prediction: Any) -> dict[str, float]:
    """Share of the tokens that were the most likely ones."""
    guessed = prediction.predictions[:, :-1].argmax(-1)
    wanted = prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == wanted)[wanted != -100].mean())}


def result(trainer: Any, case: Case, folder: Path) -> dict[str, Any]:
    import resource

    from hf_memkit.memory.records import read_records, steps

    state, optimizer = trainer.state, trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    found: dict[str, Any] = {
        "losses": [round(entry["loss"], 5) for entry in state.log_history if "loss" in entry],
        "optimizer_class": type(optimizer).__name__,
        "expected_steps": state.global_step,
        "host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
    }
    if case.data == "unequal":
        made = steps(read_records(folder / "memory-rank0.jsonl"))[2:]
        step_time_ms = statistics.fmean(step["step_time_ms"] for step in made)
        found["tokens_per_s"] = state.num_input_tokens_seen / state.global_step / step_time_ms * 1000
    return found


def write(folder: Path, content: Any) -> int:
    (folder / "result.json").write_text(json.dumps(content))
    return 0
