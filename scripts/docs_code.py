"""Blocks of pages that come from code and from files of the package: rules, techniques, presets, recipes."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import groupby
from typing import get_args

from docs_blocks import ROOT, block, table

from benchmarks.parameter_bytes import PARAMETER_BYTES
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.checks import RULES, Rule
from hf_memkit.common import resources
from hf_memkit.common.units import GIB
from hf_memkit.deepspeed.presets import preset_index
from hf_memkit.measuring.out_of_memory.engine_failures import FAILURES
from hf_memkit.recipes.schema import load_recipe
from hf_memkit.recipes.stored_predictions import StoredPrediction, stored
from hf_memkit.recipes.tasks import TASKS, find_task
from hf_memkit.setup.techniques.registry import CATALOGUE, FAMILIES, TECHNIQUES, Family, assignment


@block("docs/checks.md", "screen")
def check_screen() -> str:
    """The output that tests/checks/test_files.py compares with the command's."""
    return f"```text\n{(ROOT / 'tests' / 'checks' / 'check_screen.txt').read_text().rstrip()}\n```"


@block("docs/checks.md", "rules")
def rules() -> str:
    """A section for each module of rules."""
    sections = []
    for heading, of_heading in groupby(sorted(RULES.values(), key=rule_heading), rule_heading):
        rows = [[f"`{rule.id}`", rule.severity, rule.why, rule.fix, rule.source] for rule in of_heading]
        sections.append(f"## {heading}\n\n{table('rule | severity | why | fix | source', rows)}")
    return "\n\n".join(sections)


def rule_heading(rule: Rule) -> str:
    """The first words of the docstring of the rule's module, up to a colon or a full stop."""
    words = import_module(f"hf_memkit.checks.rules.{rule.module}").__doc__ or rule.module
    return re.split(r"[:.](?:\s|$)", words)[0]


@block("docs/techniques/README.md", "techniques")
def techniques() -> str:
    """Every technique, in the order in which they are applied."""
    rows = []
    for one in sorted(TECHNIQUES.values(), key=lambda one: FAMILIES.index(one.family)):
        link = f"[`{one.name}`]({one.family}.md#{one.name})"
        rows.append([link, one.family, one.saves, one.costs, one.not_when])
    return table("technique | family | saves | costs | not when", rows)


@block("docs/out-of-memory.md", "changes")
def changes() -> str:
    """Every change that advice may propose."""
    rows = []
    for one in sorted(CATALOGUE.values(), key=lambda one: get_args(Family).index(one.family)):
        if not one.settings:
            continue
        name = f"[`{one.name}`](techniques/{one.family}.md#{one.name})" if one.apply else f"`{one.name}`"
        rows.append([name, f"`{assignment(one.key, one.settings[one.key])}`", one.saves, one.costs, one.group])
    return table("name | change | what it does | cost | result", rows)


@block("docs/out-of-memory.md", "failures")
def failures() -> str:
    """Every error of an engine that `memkit explain` knows."""
    rows = []
    for one in FAILURES:
        rule = f"[`{one.rule}`](checks.md)" if one.rule else "—"
        rows.append([one.what, f"`{one.fixes[0].assignment}`: {one.fixes[0].reason}", rule, one.source])
    return table("what happened | first fix | rule of `memkit check` | source", rows)


@block("docs/techniques/precision.md", "bytes")
def parameter_bytes() -> str:
    """Bytes a parameter, as tests measure them."""
    rows = []
    for name, one in PARAMETER_BYTES.items():
        sizes = (one.weights, one.gradients, one.states, one.elsewhere, one.held, one.copies)
        rows.append([f"`{name}`", *(size or None for size in sizes)])
    columns = "weight | gradient | AdamW's moments | elsewhere | between two steps | copies under autocast"
    return table(f"technique | {columns}", rows)


@block("docs/predict.md", "gpus")
def gpus() -> str:
    """The GPUs that have a name."""
    return f"{', '.join(f'`{name}`' for name in KNOWN_GPUS)}."


@block("ds_configs/README.md", "presets")
def deepspeed_presets() -> str:
    """Each preset as index.yaml describes it."""
    rows = []
    for each in preset_index().values():
        needs = list(each.packages)
        if each.deepspeed:
            needs.insert(0, f"deepspeed{each.deepspeed}")
        if each.gpus > 1:
            needs.insert(0, f"{each.gpus} GPUs")
        if each.not_on_cpu:
            needs.append(f"a GPU: {each.not_on_cpu}")
        link = f"[`{each.name}`]({each.name}.json)"
        rows.append([link, each.summary, each.audience, each.saves, each.costs, ", ".join(needs) or None])
    return table("preset | what it is | for | saves | costs | needs", rows)


@block("recipes/README.md", "recipes")
def recipes() -> str:
    """Every variant of every recipe, with the first kind of checkpointing with which it fits."""
    rows = []
    for name in resources.names("recipes"):
        recipe = load_recipe(name)
        gpu = recipe.card if recipe.gpus == 1 else f"{recipe.gpus} × {recipe.card}"
        predictions = [StoredPrediction.from_json(each) for each in stored()["recipes"][name]["predicted"]]
        for each in first_that_fit(predictions):
            needs = each.prediction
            ram_bytes = (needs.host_rss_bytes or 0) + (needs.pinned_bytes or 0)
            sizes = (needs.peak_reserved_bytes[1], ram_bytes, needs.disk_bytes)
            row = [f"[{name}]({name}.yaml)", gpu if each.bf16 else "T4 (fp16)", each.variant]
            row += [each.checkpointing or "the preset's", f"{each.micro_batch_size} × {each.accumulation}"]
            row += [each.sequence_length, *(f"{size / GIB:.1f}" if size else None for size in sizes), needs.verdict]
            rows.append(row)
    columns = "batch | sequence length | predicted reserved, GiB | RAM, GiB | disk, GiB | verdict"
    return table(f"recipe | GPU | variant | checkpointing | {columns}", rows)


def first_that_fit(predictions: list[StoredPrediction]) -> list[StoredPrediction]:
    """Of each variant and GPU the first prediction that fits, else the last."""
    chosen: dict[tuple[str, bool], StoredPrediction] = {}
    for each in predictions:
        before = chosen.get((each.variant, each.bf16))
        if before is None or str(before.prediction.verdict) == "does not fit":
            chosen[each.variant, each.bf16] = each
    return list(chosen.values())


@block("recipes/README.md", "data")
def data() -> str:
    """What each task's data look like, and which recipes take it."""
    task_of = {recipe: load_recipe(recipe).task for recipe in resources.names("recipes")}
    rows = []
    for name in TASKS:
        task = find_task(name)
        users = [recipe for recipe, its_task in task_of.items() if its_task == name]
        rows.append([name, task.local_form, f"`{task.reading.EXAMPLE}`", ", ".join(users)])
    return table("task | `--data` | one line of it | recipes", rows)
