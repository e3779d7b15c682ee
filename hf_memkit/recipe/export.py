"""Setup → a plain training script that its owner can read and change, and that needs memkit only for its callback.

`train.py` holds the whole job in the order in which it happens; every setting stands there with its reason as a
comment. Beside it `ds_config.json` (with DeepSpeed), `adamw8bit.py` (with the 8-bit optimizer) and
`deepspeed_wiring.py` (with NVMe).
"""

from __future__ import annotations

import json
import pprint
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from hf_memkit import compat
from hf_memkit._version import __version__
from hf_memkit.errors import InputError
from hf_memkit.models import hub_reachable
from hf_memkit.recipe.build import optimizer_options
from hf_memkit.recipe.run import Run
from hf_memkit.training_setup import TrainingSetup

__all__ = ["export_script"]

_WIDTH: Final = 110


def export_script(job: Run, folder: Path) -> list[Path]:
    """Writes the job into `folder`; returns the files, the script first.

    Raises:
        InputError: the folder holds files of that name already, or cannot be written to.
    """
    files = {"train.py": _script(job)}
    if "deepspeed.config" in job.setup:
        files["ds_config.json"] = json.dumps(job.setup["deepspeed.config"], indent=2) + "\n"
    if "optimizer.class" in job.setup:
        source = Path(__file__).parents[1] / "techniques" / "adamw8bit.py"
        files["adamw8bit.py"] = source.read_text(encoding="utf-8")
    if _on_nvme(job.setup):
        source = Path(__file__).parents[1] / "zero" / "wiring.py"
        files["deepspeed_wiring.py"] = source.read_text(encoding="utf-8")
    taken = [name for name in files if (folder / name).exists()]
    if taken:
        raise InputError(f"--export {folder}: holds {', '.join(taken)} already; give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--export {folder}: cannot be written to ({error.strerror}); give another folder") from None
    return [folder / name for name in files]


def _on_nvme(setup: TrainingSetup) -> bool:
    return "offload_param" in setup.get("deepspeed.config", {}).get("zero_optimization", {})


def _script(job: Run) -> str:
    setup = job.setup
    what = "the rehearsal (no GPU) of " if job.is_rehearsal else ""
    parts = [
        f'"""Trains {what}recipe {job.recipe}, variant {job.variant}; written by memkit {__version__}.\n\n'
        f"Run:    python train.py\n"
        f"Needs:  {_requirements(setup)}\n"
        f'"""',
        _imports(setup),
        "HERE = Path(__file__).resolve().parent",
        _environment(setup),
        _data(setup),
        _packing(setup),
        _arguments(setup),
        _model(setup),
        _training(setup),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _requirements(setup: TrainingSetup) -> str:
    names = ["torch", "transformers", "accelerate", "datasets", "hf-memkit"]
    names += ["deepspeed"] if "deepspeed.config" in setup else []
    names += ["torchao"] if "optimizer.class" in setup else []
    names += ["peft"] if setup.section("adapter") else []
    return f"{', '.join(names)} (made with torch {version('torch')}, transformers {version('transformers')})"


def _imports(setup: TrainingSetup) -> str:
    trained, fallback = _tokenizer_is_trained(setup), _uses_fallback(setup)
    lines = ["import os"] if _variables(setup) else []
    lines += ["from pathlib import Path", ""]
    lines += ["import numpy as np", "import torch"]
    datasets = ["Dataset"] if fallback else ["Dataset", "load_dataset"]
    lines += [f"from datasets import {', '.join(datasets)}"]
    lines += ["from hf_memkit import attach"]
    lines += ["from peft import LoraConfig, get_peft_model"] if setup.section("adapter") else []
    lines += ["from tokenizers import ByteLevelBPETokenizer"] if trained else []
    names = ["AutoConfig"] if _random_weights(setup) else []
    names += ["AutoModelForCausalLM", "PreTrainedTokenizerFast" if trained else "AutoTokenizer"]
    names += ["Trainer", "TrainingArguments", "set_seed"]
    lines += [f"from transformers import {', '.join(names)}"]
    lines += ["", "from adamw8bit import AdamW8bit"] if "optimizer.class" in setup else []
    lines += ["", "from deepspeed_wiring import DeepSpeedWiring"] if _on_nvme(setup) else []
    lines.insert(1 if lines[0] == "import os" else 0, "from pydoc_data.topics import topics") if fallback else None
    return "\n".join(_sorted_standard_library(lines))


def _sorted_standard_library(lines: list[str]) -> list[str]:
    """The first group of imports as isort has it: `import …` first, then `from …`."""
    end = lines.index("")
    return sorted(lines[:end], key=lambda line: (line.startswith("from"), line)) + lines[end:]


def _variables(setup: TrainingSetup) -> dict[str, tuple[str, str]]:
    """Environment variables with their reasons."""
    found = {
        s.key.partition(".")[2]: (str(s.value), s.reason) for s in setup.settings if s.key.startswith("environment.")
    }
    if not setup.get("arguments.use_cpu"):
        found["CUDA_VISIBLE_DEVICES"] = ("0", "one card: with several in sight Trainer would multiply the batch")
    if "deepspeed.config" in setup:
        why = "what a launcher would set, for one process"
        port = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        found |= {name: (value, why) for name, value in port.items()}
    return found


def _environment(setup: TrainingSetup) -> str:
    variables = _variables(setup)
    if not variables:
        return ""
    lines = ["# Read when torch and DeepSpeed start."]
    reason = ""
    for name, (value, why) in variables.items():
        lines += _comment(why) if why != reason else []
        lines.append(f"os.environ.setdefault({name!r}, {value!r})".replace("'", '"'))
        reason = why
    return "\n".join(lines)


def _has_hub(setup: TrainingSetup) -> bool:
    """Whether the script may load from the hub. One for a card will run elsewhere, and is about the real model: there
    a hub that cannot be reached is an error that its owner sees. A rehearsal runs here, with what can be had here."""
    return hub_reachable() or not setup.get("arguments.use_cpu")


def _uses_fallback(setup: TrainingSetup) -> bool:
    return setup["data.source"] is None and not _has_hub(setup)


def _tokenizer_is_trained(setup: TrainingSetup) -> bool:
    name = setup["data.tokenizer"]
    return name is None or not (_has_hub(setup) or Path(name).is_dir())


def _random_weights(setup: TrainingSetup) -> bool:
    return setup["model.origin"] == "architecture" and bool(setup.get("arguments.use_cpu") or not _has_hub(setup))


def _data(setup: TrainingSetup) -> str:
    source, column = setup["data.source"], setup["data.text_column"]
    lines = ["# Documents."]
    if _uses_fallback(setup):
        lines.append("texts = [text for _, text in sorted(topics.items())]  # the text of Python's own help")
    elif source is None:
        lines.append(
            f'dataset = load_dataset("{setup["data.hub_id"]}", {_literal(setup["data.hub_config"])}, split="train")'
        )
        lines.append(f'texts = dataset["{column}"]')
    else:
        lines += _load(str(source), column)
    lines += ["", "# Tokenizer."]
    if _tokenizer_is_trained(setup):
        lines += [
            "bpe = ByteLevelBPETokenizer()",
            f"bpe.train_from_iterator(texts, vocab_size={setup['data.vocabulary_size']}, "
            'special_tokens=["<|endoftext|>"], show_progress=False)',
            "tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, "
            'eos_token="<|endoftext|>", pad_token="<|endoftext|>")',
        ]
    else:
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{setup["data.tokenizer"]}")')
    return "\n".join(lines)


def _load(source: str, column: str) -> list[str]:
    """Lines that load a `--data` value through datasets."""
    path = Path(source)
    if not path.exists():
        name, _, config = source.partition(":")
        return [
            f'dataset = load_dataset("{name}", {_literal(config or None)}, split="train")',
            f'texts = dataset["{column}"]',
        ]  # fmt: skip
    files = (
        sorted(str(file.resolve()) for file in path.rglob("*") if file.is_file())
        if path.is_dir()
        else [str(path.resolve())]
    )
    suffix = Path(files[0]).suffix.lower()
    kind = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}.get(suffix, "text")
    sample = ', sample_by="document"' if kind == "text" else ""
    listed = textwrap.indent(",\n".join(f"    {_literal(file)}" for file in files), "")
    return [
        f"files = [\n{listed},\n]",
        f'dataset = load_dataset("{kind}", data_files=files{sample}, split="train")',
        f'texts = dataset["{"text" if kind == "text" else column}"]',
    ]


def _packing(setup: TrainingSetup) -> str:
    batch = setup["arguments.per_device_eval_batch_size"]
    return textwrap.dedent(
        f"""\
        # Documents joined by the end-of-text token and cut into blocks: no padding. The last blocks are held out.
        LENGTH = {setup["data.sequence_length"]}  # tokens
        ids: list[int] = []
        for text in texts:
            if text and not text.isspace():
                tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                ids += [*tokens, tokenizer.eos_token_id]
        blocks = np.array(ids[: len(ids) // LENGTH * LENGTH], dtype=np.int32).reshape(-1, LENGTH)
        held_out = max(1, round({setup["data.held_out"]} * len(blocks)))


        def as_dataset(rows: np.ndarray) -> Dataset:
            labels = rows.copy()
            labels[:, 0] = -100  # nothing predicts the first token; Trainer's mean would count it
            return Dataset.from_dict({{"input_ids": rows, "labels": labels}}).with_format("torch")


        train_dataset = as_dataset(blocks[:-held_out])
        evaluated = min(held_out, {setup["data.evaluated_blocks"]})
        evaluated = evaluated // {batch} * {batch} or evaluated  # whole batches
        eval_dataset = as_dataset(blocks[-held_out:][:evaluated])"""
    )


def _arguments(setup: TrainingSetup) -> str:
    reasons = {s.key: s.reason for s in setup.settings}
    installed = {key: compat.to_installed_arguments({key: value}) for key, value in setup.arguments.items()}
    lines = ["arguments = TrainingArguments("]
    for key, named in installed.items():
        (name, value), reason = next(iter(named.items())), reasons[f"arguments.{key}"]
        if key == "output_dir":
            lines.append('    output_dir=str(HERE / "run"),')
            continue
        lines += _comment(reason, "    ")
        lines.append(f"    {name}={_literal(value)},")
    if "deepspeed.config" in setup:
        lines += _comment(reasons["deepspeed.preset"], "    ")
        lines.append('    deepspeed=str(HERE / "ds_config.json"),')
    return "\n".join([*lines, ")", "set_seed(arguments.seed)"])


def _model(setup: TrainingSetup) -> str:
    reasons = {s.key: s.reason for s in setup.settings}
    dtype = f"torch.{setup['model.dtype']}"
    lines = _comment(reasons["model.dtype"])
    if _random_weights(setup):
        architecture = dict(setup["model.architecture"])
        architecture.pop("transformers_version", None)
        model_type = architecture.pop("model_type")
        values = textwrap.indent("".join(f"{key}={_literal(value)},\n" for key, value in architecture.items()), "    ")
        lines += ["# RANDOM weights: a small model of the same architecture, for the rehearsal."]
        lines += [f'config = AutoConfig.for_model(\n    "{model_type}",\n{values})']
        lines += [f"model = AutoModelForCausalLM.from_config(config, dtype={dtype})"]
    else:
        lines += [f'model = AutoModelForCausalLM.from_pretrained("{setup["model.name"]}", dtype={dtype})']
    multiple = setup.get("model.pad_vocabulary_to_multiple_of")
    if multiple:
        lines += _comment(reasons["model.pad_vocabulary_to_multiple_of"])
        lines += [f"model.resize_token_embeddings(pad_to_multiple_of={multiple})"]
    if setup.section("adapter"):
        options = textwrap.indent(
            "".join(f"{k}={_literal(v)},\n" for k, v in setup.section("adapter").items()), "    "
        )
        lines += [f"adapters = LoraConfig(\n{options})", "model = get_peft_model(model, adapters)"]
    return "\n".join(lines)


def _training(setup: TrainingSetup) -> str:
    options = optimizer_options(setup)
    optimizer = ""
    if options is not None:
        values = textwrap.indent("".join(f'"{key}": {_literal(value)},\n' for key, value in options.items()), " " * 12)
        optimizer = f"    optimizer_cls_and_kwargs=(\n        AdamW8bit,\n        {{\n{values}        }},\n    ),\n"
    wiring = ""
    if _on_nvme(setup):
        wiring = "trainer.add_callback(DeepSpeedWiring(lambda: trainer.deepspeed))  # saves with NVMe\n"
    return (
        "trainer = Trainer(\n"
        "    model=model,\n"
        "    args=arguments,\n"
        "    train_dataset=train_dataset,\n"
        "    eval_dataset=eval_dataset,\n"
        "    processing_class=tokenizer,\n"
        f"{optimizer}"
        ")\n"
        "attach(trainer)  # memory at every step: run/memory-rank0.jsonl\n"
        f"{wiring}"
        "trainer.train()\n"
        'trainer.save_model(str(HERE / "run" / "model"))'
    )


def _comment(reason: str, indent: str = "") -> list[str]:
    return textwrap.wrap(reason, _WIDTH - len(indent), initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _literal(value: Any) -> str:
    """A Python literal with double quotes, as formatters write it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    return pprint.pformat(value)
