"""The part of an exported script that reads images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.models import hub_reachable
from hf_memkit.recipe.export_data import literal, uses_fallback
from hf_memkit.recipe.tasks.image_files import split_folders
from hf_memkit.recipe.tasks.media import load_table_line, source_text
from hf_memkit.recipe.tasks.task import Script
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.user_files import user_path

__all__ = ["image_script"]

_OF_DATASETS: Final = ("ClassLabel", "Dataset", "Features", "Image", "concatenate_datasets", "load_dataset")


def image_script(job: Any, image_processor: Any) -> Script:
    """Lines that read the same images, and the files that they need.

    Args:
        job: the run.
        image_processor: what it would use here.
    """
    setup = job.setup
    fallback = uses_fallback(setup)
    files = {"image_batches.py": source_text("hf_memkit.components.image_batches")}
    data_lines = _data_lines(setup)
    used = [name for name in _OF_DATASETS if any(name in line for line in data_lines)]
    imports = [f"from datasets import {', '.join(used)}"]
    if fallback:
        files["made_up_images.py"] = source_text("hf_memkit.recipe.tasks.made_up_images")
        imports.append("from made_up_images import LABELS, made_up_images")
    imports.append("from image_batches import Accuracy, ImageBatches, each_label_split, most_likely")
    own = setup["data.tokenizer"]
    made = own is None or (not hub_reachable() and not Path(own).is_dir())
    lines = [*data_lines, "", *_split_lines(job)]
    if made:
        lines += ["", f"image_processor = ViTImageProcessor(size={literal(dict(image_processor.size))})"]
    else:
        lines += ["", f'image_processor = AutoImageProcessor.from_pretrained("{own}")']
    dtype = setup.get("model.dtype")
    cast = f", dtype=torch.{dtype}" if dtype else ""
    return Script(
        data="\n".join(lines),
        imports=tuple(imports),
        transformers=("ViTImageProcessor" if made else "AutoImageProcessor",),
        processing="image_processor",
        model_values=(
            "num_labels=len(labels)",
            "id2label=dict(enumerate(labels))",
            "label2id={label: number for number, label in enumerate(labels)}",
            *(() if setup["model.origin"] == "architecture" else ("ignore_mismatched_sizes=True",)),
        ),
        trainer=(
            f"    data_collator=ImageBatches(image_processor, smallest_crop={setup['data.smallest_crop']}{cast}),",
            "    compute_metrics=Accuracy(),",
            "    preprocess_logits_for_metrics=most_likely,",
        ),
        requirements=("pillow",),
        files=files,
    )


def _data_lines(setup: TrainingSetup) -> list[str]:
    """Lines that make `rows` and `labels`."""
    source, columns = setup["data.source"], setup["data.columns"]
    lines = ["# Images: files that are opened when their batch is made."]
    ending = ['rows = rows.cast_column("image", Image(decode=False))', 'labels = rows.features["label"].names']
    if uses_fallback(setup):
        features = 'Features({"image": Image(decode=False), "label": ClassLabel(names=list(LABELS))})'
        return [*lines, f"rows = Dataset.from_list(made_up_images(), features={features})", "labels = list(LABELS)"]
    path = user_path(str(source)) if source is not None else None
    if path is None or not path.exists():
        name, config, split = setup["data.hub_id"], setup["data.hub_config"], setup["data.hub_split"]
        if source is not None:
            name, _, asked = str(source).partition(":")
            config, split = asked or None, "train"
        image, label = columns["image"], columns["label"]
        lines.append(f'rows = load_dataset("{name}", {literal(config)}, split="{split}")')
        lines.append(f'rows = rows.select_columns(["{image}", "{label}"])')
        for have, want in ((image, "image"), (label, "label")):
            lines += [f'rows = rows.rename_column("{have}", "{want}")'] if have != want else []
        lines += [
            'if not isinstance(rows.features["label"], ClassLabel):',
            '    rows = rows.class_encode_column("label")',
        ]
        return [*lines, *ending]
    table = path if path.is_file() else next((path / name for name in _METADATA if (path / name).is_file()), None)
    if table is not None:
        return [*lines, *_table_lines(table, columns), *ending]
    folders = split_folders(path)
    if folders is None:
        lines.append(
            f'rows = load_dataset("imagefolder", data_dir="{path.resolve()}", drop_labels=False, split="train")'
        )
        return [*lines, *ending]
    train, held_out = folders
    return [
        *lines,
        f'FILES = {{"train": "{train.resolve()}/**", "held_out": "{held_out.resolve()}/**"}}',
        'both = load_dataset("imagefolder", data_files=FILES, drop_labels=False)  # so they have the same labels',
        'train_rows, held_out_rows = both["train"], both["held_out"]',
        "rows = concatenate_datasets([train_rows, held_out_rows])",
        *ending,
    ]


_METADATA: Final = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def _table_lines(table: Path, columns: Mapping[str, str]) -> list[str]:
    """Lines that read a table of paths and labels."""
    image, label = columns["image"], columns["label"]
    return [
        f'FOLDER = Path("{table.parent.resolve()}")',
        load_table_line("rows", table),
        f'name = "{image}" if "{image}" in rows.column_names else "file_name"',
        "rows = Dataset.from_dict(",
        '    {"image": [str(FOLDER / each) for each in rows[name]],',
        f'     "label": [str(each) for each in rows["{label}"]]}}',
        ').class_encode_column("label")',
    ]


def _split_lines(job: Any) -> list[str]:
    """Lines that make `train_dataset` and `eval_dataset`."""
    setup = job.setup
    source = setup["data.source"]
    path = user_path(str(source)) if source is not None else None
    batch = setup["arguments.per_device_eval_batch_size"] * job.processes
    if path is not None and path.is_dir() and split_folders(path) is not None:
        split = [
            "train = list(range(len(train_rows)))",
            'order = sum(each_label_split(held_out_rows["label"], 0.5), [])  # labels mixed evenly',
            "held_out = [len(train) + number for number in order]",
        ]
    else:
        split = [
            "# The last of each label are held out.",
            f'train, held_out = each_label_split(rows["label"], {setup["data.held_out"]})',
        ]
    return [
        *split,
        "trained = set(train)",
        'rows = rows.add_column("augment", [number in trained for number in range(len(rows))])',
        "train_dataset = rows.select(train)",
        f"evaluated = min(len(held_out), {setup['data.evaluated_blocks']})",
        f"evaluated = evaluated // {batch} * {batch} or evaluated  # whole batches",
        "eval_dataset = rows.select(held_out[:evaluated])",
    ]
