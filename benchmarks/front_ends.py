"""Front ends with tiny models on a CPU: each of their trainings predicted, and trained, phase by phase.

    python benchmarks/front_ends.py trl=PYTHON llama-factory=PYTHON ms-swift=PYTHON axolotl=PYTHON     # minutes

PYTHON: that of an environment with the front end in it (`pip install llamafactory==0.9.5`, `ms-swift==4.6.0`,
`axolotl==0.19.0`, TRL); memkit is not installed there. Writes benchmarks/results/front_ends.json, from which
docs/your-tools.md has its outputs. A front end that is left out keeps what the file has of it.

The model is a Llama of two layers with random weights, the data are made up. `errors`: predicted on fake CPU tensors
over what a real training on the CPU held, less one, by phase; axolotl's kernels need a GPU, so there it is absent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from benchmarks.provenance import RESULTS, provenance
from hf_memkit.common import boot
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.worker import Worker

FILE: Final = RESULTS / "front_ends.json"
_LIMIT_S: Final = 400


@dataclass(frozen=True, slots=True)
class Job:
    """A training by a front end: the words of its command, with the config that it names, if it names one."""

    name: str
    words: tuple[str, ...]
    config: Mapping[str, Any] | None = None


_LLAMA_FACTORY: Final = {
    "model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "lora", "dataset_dir": ".",
    "dataset": "mine", "template": "llama3", "resize_vocab": True, "cutoff_len": 128, "output_dir": "out",
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-4, "max_steps": 3,
    "report_to": "none",
}  # fmt: skip
_AXOLOTL: Final = {
    "base_model": "model", "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True,
    "datasets": [{"path": "chats.jsonl", "type": "chat_template", "field_messages": "messages"}],
    "chat_template": "tokenizer_default", "dataset_prepared_path": "prepared", "output_dir": "out",
    "sequence_len": 128, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "bf16": True,
    "optimizer": "adamw_torch", "learning_rate": 1e-4, "val_set_size": 0,
}  # fmt: skip
_SWIFT: Final = {
    "model": "model", "model_type": "llama", "template": "dummy", "dataset": "chats.jsonl", "output_dir": "out",
    "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 128,
    "torch_dtype": "float32", "report_to": "none", "eval_strategy": "no", "split_dataset_ratio": 0,
    "check_model": "false",
}  # fmt: skip


def _llama_factory(name: str, **changes: Any) -> Job:
    return Job(name, ("llamafactory-cli", "train", "job.yaml"), {**_LLAMA_FACTORY, **changes})


def _axolotl(name: str, **changes: Any) -> Job:
    config = {key: value for key, value in {**_AXOLOTL, **changes}.items() if value is not None}
    return Job(name, ("axolotl", "train", "job.yaml"), config)


def _swift(name: str, **changes: Any) -> Job:
    options = {**_SWIFT, **changes}
    words = (word for key, value in options.items() for word in (f"--{key}", str(value)))
    return Job(name, ("swift", "sft", *words))


_TRL: Final = (
    "--model_name_or_path", "model", "--dataset_name", "chats", "--output_dir", "out", "--max_steps", "3",
    "--per_device_train_batch_size", "2", "--max_length", "128", "--bf16", "false", "--report_to", "none",
)  # fmt: skip

JOBS: Final[Mapping[str, tuple[Job, ...]]] = {
    "trl": (Job("SFT, LoRA", ("trl", "sft", *_TRL, "--use_peft")), Job("SFT, full", ("trl", "sft", *_TRL))),
    "llama-factory": (
        _llama_factory("SFT, LoRA"),
        _llama_factory("SFT, LoRA, packing", packing=True),
        _llama_factory("SFT, full", finetuning_type="full"),
        _llama_factory("SFT, QLoRA", quantization_bit=4, template="default", resize_vocab=False),
        _llama_factory("DPO, LoRA", stage="dpo", dataset="pairs", pref_beta=0.1),
    ),
    "ms-swift": (
        _swift("SFT, LoRA", tuner_type="lora"),
        _swift("SFT, full", tuner_type="full"),
        _swift("SFT, QLoRA", tuner_type="lora", quant_method="bnb", quant_bits=4),
    ),
    "axolotl": (
        _axolotl("SFT, LoRA"),
        _axolotl("SFT, LoRA, packing", sample_packing=True, attn_implementation="flash_attention_2"),
        _axolotl("SFT, full", adapter=None, lora_r=None, lora_alpha=None, lora_target_linear=None),
        _axolotl("SFT, QLoRA", adapter="qlora", load_in_4bit=True),
    ),
}  # fmt: skip


def make_files(folder: Path) -> None:
    """A model, its tokenizer, and data, as all front ends read them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["hello world what is this", "a dog runs in the park"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=512
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"instruction": f"Say {i}", "input": "", "output": "Hello world " * (1 + i % 7)} for i in range(60)]
    pairs = [{**row, "chosen": row["output"], "rejected": "No"} for row in rows]
    chats = [[("user", row["instruction"]), ("assistant", row["output"])] for row in rows]
    messages = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    _write(folder / "rows.json", json.dumps(rows))
    _write(folder / "pairs.json", json.dumps(pairs))
    _write(folder / "chats.jsonl", "\n".join(map(json.dumps, messages)))
    (folder / "chats").mkdir()
    _write(folder / "chats" / "train.jsonl", "\n".join(map(json.dumps, messages)))
    ranked = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    data = {
        "mine": {"file_name": "rows.json"}, "pairs": {"file_name": "pairs.json", "ranking": True, "columns": ranked},
    }  # fmt: skip
    _write(folder / "dataset_info.json", json.dumps(data))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


class Environment:
    """One front end's Python, with memkit outside of it."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
        lent = boot.place_of(yaml.__file__)
        self.variables = {**os.environ, "PATH": path, boot.PLACE: lent, "CUDA_VISIBLE_DEVICES": ""}
        self.variables |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "COLUMNS": "100"}

    def memkit(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = boot.command(*words, python=self.python)
        return subprocess.run(
            command, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=_LIMIT_S
        )


def measure(front_end: str, python: str) -> dict[str, Any]:
    """All jobs of a front end, and what its commands print for the first."""
    rows, outputs = [], {}
    for number, job in enumerate(JOBS[front_end]):
        with tempfile.TemporaryDirectory(prefix="memkit-front-end-") as place:
            folder = Path(place)
            make_files(folder)
            if job.config is not None:
                _write(folder / "job.yaml", yaml.safe_dump(dict(job.config)))
            here = Environment(python, folder)
            row = _measured(here, job, on_cpu=front_end != "axolotl")
            rows.append(row)
            print(front_end, json.dumps(row), flush=True)
            if number == 0:
                outputs = _outputs(here, job, runs=front_end != "axolotl")
    return {"jobs": rows, "outputs": outputs, **provenance()}


def _measured(here: Environment, job: Job, *, on_cpu: bool) -> dict[str, Any]:
    ran = here.memkit("predict", "--gpu", "RTX 4090", "--json", "--", *job.words)
    row: dict[str, Any] = {"job": job.name, **({"config": dict(job.config)} if job.config else {"words": job.words})}
    if ran.returncode not in (0, 1) or not ran.stdout.strip():
        return {**row, "refused": (ran.stderr.strip().splitlines() or ["no message"])[-1]}
    found = json.loads(ran.stdout)
    row |= {name: found[name] for name in ("verdict", "peak_allocated_gib", "source")}
    if not on_cpu:
        return row
    script = UserScript(
        found["request"]["script"], found["request"]["is_module"], tuple(found["request"]["arguments"])
    )
    peaks = {}
    worker = Worker(python=here.python)
    try:
        for device in ("cpu", "real cpu"):
            variables = {**here.variables, "ACCELERATE_USE_CPU": "true"}
            request = ScriptRequest(script, str(here.folder), variables, device=device, worst_batch=False)
            outcome = worker.run(request)
            if outcome.training is None:
                why = outcome.failed.message if outcome.failed is not None else outcome.died
                return {**row, "not_compared": f"{device}: {why}"}
            peaks[device] = outcome.training.trace.peaks_by_phase()
    finally:
        worker.close()
    real = peaks["real cpu"]
    return {
        **row,
        "errors": {
            phase: peaks["cpu"][phase] / real[phase] - 1
            for phase in ("forward", "backward", "optimizer", "save")
            if phase in real and phase in peaks["cpu"]
        },
    }


def _outputs(here: Environment, job: Job, *, runs: bool) -> dict[str, Any]:
    """Command → what it prints, and its exit code."""
    verbs = [("predict", "--gpu", "RTX 4090", "--short"), ("plan", "--gpu", "RTX 4090", "--short", "--limit", "20")]
    found = {}
    for verb in (*verbs, *([("run", "--records", "records")] if runs else [])):
        environment = here.variables
        here.variables = {**environment, "ACCELERATE_USE_CPU": "true"} if verb[0] == "run" else environment
        ran = here.memkit(*verb, "--", *job.words)
        here.variables = environment
        text = ran.stderr[ran.stderr.rfind("\nFinished after") :] if verb[0] == "run" else ran.stdout
        words = [*verb, "--", *job.words]
        found[verb[0]] = {"words": words, "exit": ran.returncode, "text": without_places(text, here)}
    return found


def without_places(text: str, here: Environment) -> str:
    """Without the folders of this machine."""
    return text.replace(f"{here.folder}/", "").replace(str(Path(here.python).parents[1]), "ENVIRONMENT")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("front_ends", nargs="+", metavar="NAME=PYTHON", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    content = json.loads(options.out.read_text()) if options.out.exists() else {}
    for each in options.front_ends:
        name, _, python = each.partition("=")
        if name not in JOBS or not Path(python).exists():
            parser.error(f"{each}: write one of {', '.join(JOBS)}, = and the Python of its environment")
        content[name] = measure(name, str(Path(python).absolute()))
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
