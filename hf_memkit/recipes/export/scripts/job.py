"""Shared code of the training scripts: from `args.yaml` to Trainer's arguments.

| section | becomes |
|---|---|
| `environment` | environment variables, unless they are set |
| `data` | rows, their held-out part, a tokenizer |
| `model`, `adapter`, `model_parts` | the model, loaded or built, with LoRA and components from files in this folder |
| `arguments` | `TrainingArguments`, or those of another Trainer |
| `optimizer`, `trainer_parts` | further keyword arguments of Trainer |
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast, set_seed
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_memkit.components.resuming import checkpoint_to_resume, refuse_finished, restore_all_weights
from hf_memkit.components.stopping import StopOnSignal
from hf_memkit.recipes.export.scripts.rows import Source

LOADING: Final[tuple[str, ...]] = ("device_map", "ignore_mismatched_sizes", "use_safetensors")
"""Options of `from_pretrained` that `from_config` does not take."""

MAX_CHARACTERS: Final = 100 * 2**20
"""Characters of the data that a tokenizer is trained on."""

LONG_WORD, LONG_SPACE = re.compile(r"(\S{256})(?=\S)"), re.compile(r"(\s{256})\s+")


class TrainingJob:
    """The sections of `args.yaml`, each as a dictionary, and the objects built from them.

    Attributes:
        folder: folder of `args.yaml`; relative file names start there.
        source: source of the rows.
    """

    def __init__(self, folder: Path) -> None:
        """Read the file, and set the environment variables, which torch and DeepSpeed read when they start."""
        self.folder = folder
        sections = yaml.safe_load((folder / "args.yaml").read_text(encoding="utf-8"))
        self.data: dict[str, Any] = sections["data"]
        self.source = Source(self.data, folder)
        self.model: dict[str, Any] = sections["model"]
        self.arguments: dict[str, Any] = sections["arguments"]
        self.adapter: dict[str, Any] = sections.get("adapter", {})
        self.optimizer: dict[str, Any] = sections.get("optimizer", {})
        self.model_parts: dict[str, dict[str, Any]] = sections.get("model_parts", {})
        self.trainer_parts: dict[str, dict[str, Any]] = sections.get("trainer_parts", {})
        for name, value in sections.get("environment", {}).items():
            os.environ.setdefault(name, str(value))

    def load_tokenizer(self, texts: Iterable[str]) -> Any:
        """The model's own tokenizer; if args.yaml names none, a byte-level BPE trained on `texts`."""
        data = self.data
        if data["tokenizer"] is not None:
            tokenizer = AutoTokenizer.from_pretrained(data["tokenizer"])
            if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes an empty one from no files
                raise SystemExit(f"{data['tokenizer']}: no tokenizer in it; save the model's next to its weights")
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            return tokenizer
        special = list(dict.fromkeys(data["special_tokens"].values()))
        bpe = ByteLevelBPETokenizer()
        size = data["vocabulary_size"]
        bpe.train_from_iterator(tokenizer_texts(texts), size, special_tokens=special, show_progress=False)
        options = dict(data["special_tokens"])
        if "one_text" in data:
            numbered = [(token, number) for number, token in enumerate(special)]
            single, pair = data["one_text"], data.get("two_texts")
            bpe._tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=numbered)
            options["model_input_names"] = ["input_ids", "attention_mask"]
            if pair is not None and ":1" in pair:
                options["model_input_names"].append("token_type_ids")
        return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **options)

    def hold_out(self, rows: Dataset) -> tuple[Dataset, Dataset]:
        """Split the rows: to train on, and to evaluate (the last ones, at most `evaluated_blocks`)."""
        if len(rows) < 2:
            self.source.refuse(f"{len(rows)} example; the minimum is 2, one to train on and one to hold out")
        share = max(1, round(self.data["held_out"] * len(rows)))
        first = len(rows) - min(share, self.data["evaluated_blocks"], len(rows) - 1)
        return rows.select(range(first)), rows.select(range(first, len(rows)))

    def training_arguments(self, kind: type) -> Any:
        """The section `arguments` as an object of class `kind`, such as TrainingArguments. Create it before the model
        and keep it: under ZeRO-3 it makes `from_pretrained` split the weights while reading them."""
        options = {**self.arguments, "output_dir": str(Path(self.folder, self.arguments["output_dir"]))}
        if "deepspeed" in options:
            options["deepspeed"] = str(self.folder / options["deepspeed"])
        arguments = kind(**options)
        if arguments.deepspeed and arguments.use_cpu and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # On a CPU nothing else starts DeepSpeed's communication before the model is made.
            import deepspeed

            deepspeed.init_distributed(dist_backend="gloo")
        set_seed(arguments.seed)
        return arguments

    def load_model(self, kind: Any, **from_data: Any) -> Any:
        """The model: its weights loaded or, with `model.architecture`, a small one with RANDOM weights.

        Args:
            kind: one of transformers' `AutoModel…` classes.
            from_data: config values that depend on the data, such as the number of labels.
        """
        model = self.model
        values = {**model.get("config", {}), **from_data}
        options: dict[str, Any] = {name: model[name] for name in ("attn_implementation", *LOADING) if name in model}
        if "dtype" in model:
            options["dtype"] = getattr(torch, model["dtype"])
        if "architecture" in model:
            architecture = {**model["architecture"], **values}
            config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
            loaded = kind.from_config(config, **{name: options[name] for name in options if name not in LOADING})
        else:
            if "quantization" in model:
                options["quantization_config"] = BitsAndBytesConfig(**model["quantization"])
            loaded = kind.from_pretrained(model["name"], **options, **values)
        if "pad_vocabulary_to_multiple_of" in model:
            loaded.resize_token_embeddings(pad_to_multiple_of=model["pad_vocabulary_to_multiple_of"])
        if self.adapter:
            from peft import LoraConfig, get_peft_model

            loaded = get_peft_model(loaded, LoraConfig(**self.adapter))
        for name, component_options in self.model_parts.items():
            import_module(name).install(loaded, **component_options)
        return loaded

    def trainer_options(self, model: Any, arguments: Any, processing_class: Any) -> dict[str, Any]:
        """Keyword arguments of Trainer: these three, the optimizer, and those of components."""
        embeddings = getattr(model.config.get_text_config(), "vocab_size", None)
        if embeddings is not None and hasattr(processing_class, "eos_token") and len(processing_class) > embeddings:
            raise SystemExit(
                f"{self.model.get('name', 'the model')}: its tokenizer has {len(processing_class)} entries, and the "
                f"model has embeddings for {embeddings}. Call model.resize_token_embeddings({len(processing_class)}) "
                "and save the model, or use a model with a larger vocab_size"
            )
        options = {"model": model, "args": arguments, "processing_class": processing_class, "callbacks": []}
        for name, values in self.trainer_parts.items():
            given = import_module(name).trainer_options(
                model=model, processing_class=processing_class, arguments=arguments, **values
            )
            options["callbacks"] += given.pop("callbacks", [])
            options |= given
        if self.optimizer:
            options["optimizer_cls_and_kwargs"] = _optimizer(self.optimizer, arguments)
        return options

    def prepare_trainer(self, trainer: Any) -> None:
        """Set up the Trainer just before it trains."""
        restore_all_weights(trainer)
        new_sampler = trainer._get_train_sampler

        def sampler_by_epoch(*args: Any) -> Any:
            sampler = new_sampler(*args)
            return GroupedByEpoch(sampler, trainer) if type(sampler) is LengthGroupedSampler else sampler

        trainer._get_train_sampler = sampler_by_epoch
        if trainer.args.fp16 and (self.adapter or type(trainer).__name__ == "SFTTrainer"):
            for parameter in trainer.model.parameters():
                # fp16's loss scaling needs fp32. A new head with adapters has the weights' dtype, and SFTTrainer makes
                # adapters of 4-bit weights bf16.
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        if (self.folder / "deepspeed_wiring.py").exists():
            from hf_memkit.deepspeed.wiring import DeepSpeedWiring

            trainer.add_callback(DeepSpeedWiring(lambda: trainer.deepspeed))  # saves with offloaded parameters

    def train(self, trainer: Any) -> None:
        """Train, from the newest complete checkpoint in the folder if there is one. Ctrl-C and SIGTERM finish the
        step, save a checkpoint, and end the script with exit code 130 or 143."""
        if "memkit" in type(trainer).train.__globals__["__name__"]:
            trainer.train()  # `memkit run` stops and resumes; `memkit predict` trains nothing
            return

        def say(text: str) -> None:
            if trainer.is_world_process_zero():
                print(text, flush=True)

        def mark_record() -> None:
            for callback in trainer.callback_handler.callbacks:
                if hasattr(callback, "mark_interrupted"):  # memkit's
                    callback.mark_interrupted()

        (checkpoint,) = broadcast_object_list([checkpoint_to_resume(trainer.args.output_dir, say)])
        if checkpoint is not None:
            refuse_finished(checkpoint, trainer.args)
            say(f"Continuing from {checkpoint}. To train from the first step, move the checkpoints to another folder")
        stop = StopOnSignal(say, mark_record, ranks=trainer.args.world_size)
        trainer.add_callback(stop)
        with stop:
            trainer.train(resume_from_checkpoint=checkpoint)
        if stop.requested is not None:
            say(f"Stopped after step {trainer.state.global_step}. To continue, start this script again")
            self.finish()
            raise SystemExit(128 + stop.requested)

    def finish(self) -> None:
        """Last call of a script: otherwise Python can abort on exit."""
        if (self.folder / "process_group.py").exists():
            from hf_memkit.setup.process_group import leave_process_group

            leave_process_group()


class GroupedByEpoch(LengthGroupedSampler):  # type: ignore[misc]
    """Groups rows by length, in an order that depends on the seed and the epoch only. Trainer's sampler draws it from
    torch's random state, which a resume restores too late: rows of that epoch would train twice, others never
    (transformers 5.23.0: trainer.py 1100). The epoch is Trainer's: accelerate's `set_epoch` reaches no sampler in a
    resumed epoch with several processes (accelerate 1.15.0: data_loader.py 622-639)."""

    def __init__(self, sampler: LengthGroupedSampler, trainer: Any) -> None:
        super().__init__(sampler.batch_size, lengths=sampler.lengths)
        self.trainer = trainer

    def __iter__(self) -> Iterator[int]:
        arguments, epoch = self.trainer.args, int(self.trainer.state.epoch or 0)
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        self.generator = torch.Generator().manual_seed(seed + epoch)
        return iter(super().__iter__())


def tokenizer_texts(texts: Iterable[str]) -> Iterator[str]:
    """Texts to train a tokenizer on: the first 100 Mi characters, in words of at most 256. Training time is quadratic
    in the longest word: 4 minutes for one of a million characters."""
    remaining = MAX_CHARACTERS
    for text in texts:
        if remaining <= 0:
            return
        yield LONG_SPACE.sub(r"\1", LONG_WORD.sub(r"\1\n", text[:remaining]))
        remaining -= len(text)


def _optimizer(section: Mapping[str, Any], arguments: Any) -> tuple[type, dict[str, Any]]:
    """(class, keyword arguments): the values of `arguments` listed in `takes`, or all three, and the rest of the
    section."""
    options = dict(section)
    module, _, name = options.pop("class").partition(":")
    given = {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
    }
    options |= {key: given[key] for key in options.pop("takes", given)}
    return getattr(import_module(module), name), options
