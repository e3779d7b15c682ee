"""Blocks of pages that come from code and from files of the package: rules, techniques, presets, recipes, records."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import groupby, pairwise
from typing import get_args

from docs_blocks import ROOT, block, table

from benchmarks.parameter_bytes import PARAMETER_BYTES
from hf_memkit.catalog.architectures import ARCHITECTURES
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.catalog.models import describe
from hf_memkit.checks import RULES, Rule
from hf_memkit.common import resources
from hf_memkit.common.units import GIB
from hf_memkit.deepspeed.engine_ledger import zero_ledger
from hf_memkit.deepspeed.presets import load, preset_index
from hf_memkit.measuring.record_types import RECORDS
from hf_memkit.presets import PRESETS
from hf_memkit.recipes.schema import load_recipe
from hf_memkit.recipes.stored_predictions import StoredPrediction, stored
from hf_memkit.recipes.tasks import TASKS, find_task
from hf_memkit.setup.techniques.registry import CATALOGUE, FAMILIES, TECHNIQUES, Family, Technique, assignment


@block("docs/checks.md", "screen")
def check_screen() -> str:
    """The output that tests/checks/test_files.py compares with the command's."""
    return f"```text\n{(ROOT / 'tests' / 'checks' / 'check_screen.txt').read_text().rstrip()}\n```"


@block("docs/checks.md", "rules")
def rules() -> str:
    """A section for each module of rules."""
    columns, template = (
        "rule | severity | why | fix | source",
        "`{0.id}` | {0.severity} | {0.why} | {0.fix} | {0.source}",
    )
    sections = groupby(sorted(RULES.values(), key=rule_heading), rule_heading)
    return "\n\n".join(f"## {heading}\n\n{table(of_it, columns, template)}" for heading, of_it in sections)


def rule_heading(rule: Rule) -> str:
    """The first words of the docstring of the rule's module, up to a colon or a full stop."""
    words = import_module(f"hf_memkit.checks.rules.{rule.module}").__doc__ or rule.module
    return re.split(r"[:.](?:\s|$)", words)[0]


@block("docs/techniques/README.md", "techniques")
def techniques() -> str:
    """Every technique, in the order in which they are applied."""
    ordered = sorted(TECHNIQUES.values(), key=lambda one: FAMILIES.index(one.family))
    rows = ({**vars(one), "proof": proof(one)} for one in ordered)
    template = "[`{name}`]({family}.md#{name}) | {family} | {saves} | {costs} | {not_when} | {proof}"
    return table(rows, "technique | family | saves | costs | not when | proof", template)


@block("docs/out-of-memory.md", "changes")
def changes() -> str:
    """Every change that advice may propose."""
    rows = []
    for one in sorted(CATALOGUE.values(), key=lambda one: get_args(Family).index(one.family)):
        if one.settings:
            name = f"[`{one.name}`](techniques/{one.family}.md#{one.name})" if one.apply else f"`{one.name}`"
            rows.append([name, f"`{assignment(one.key, one.settings[one.key])}`", one.saves, one.costs, one.group])
    return table(rows, "name | change | what it does | cost | result")


def proof(one: Technique) -> str:
    """What shows that a technique works, with links."""
    parts = []
    for kind, words in (("same-result", "same result"), ("memory", "memory")):
        if file := proving_tests().get((kind, one.name)):
            parts.append(f"[{words}](../../{file})")
    if one.proof == "curve":
        parts.append("[curve](optimizers.md)" if one.family == "optimizers" else "curve")
    if one.gpu_only:
        parts.append(f"memory only on a GPU: {one.gpu_only}")
    return "; ".join(parts)


@cache
def proving_tests() -> dict[tuple[str, str], str]:
    """(kind of proof, technique) → the first file of tests with its marker."""
    first: dict[tuple[str, str], str] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for kind, names in re.findall(r'@?proves\(\s*"(same-result|memory)"((?:,\s*"[\w-]+")+)', path.read_text()):
            for name in re.findall(r'"([\w-]+)"', names):
                first.setdefault((kind, name), str(path.relative_to(ROOT)))
    return first


@block("docs/techniques/precision.md", "bytes")
def parameter_bytes() -> str:
    """Bytes a parameter, as tests measure them."""
    names = ("weights", "gradients", "states", "elsewhere", "held", "copies")
    rows = ([f"`{one}`", *(getattr(each, name) or None for name in names)] for one, each in PARAMETER_BYTES.items())
    columns = "weight | gradient | AdamW's moments | elsewhere | between two steps | copies under autocast"
    return table(rows, f"technique | {columns}")


@block("docs/presets.md", "presets")
def presets() -> str:
    """Each preset with its techniques."""
    rows = []
    for name, preset in PRESETS.items():
        links = (
            f"[{each}](techniques/{TECHNIQUES[each].family}.md#{each})" + "*" * (each in preset.where_possible)
            for each in preset.techniques
        )
        rows.append([f"`{name}`", preset.audience, ", ".join(links)])
    note = "\\* left out, with a note, where it does not apply to the model."
    return f"{table(rows, 'preset | for | techniques')}\n\n{note}"


@block("docs/predict.md", "gpus")
def gpus() -> str:
    """The GPUs that have a name."""
    return f"{', '.join(f'`{name}`' for name in KNOWN_GPUS)}."


@block("ds_configs/README.md", "presets")
def deepspeed_presets() -> str:
    """Each preset as index.yaml describes it."""
    rows = []
    for each in preset_index().values():
        needs = [f"{each.gpus} GPUs"] if each.gpus > 1 else []
        needs += [f"deepspeed{each.deepspeed}"] if each.deepspeed else []
        needs += [*each.packages, *([f"a GPU: {each.not_on_cpu}"] if each.not_on_cpu else [])]
        link = f"[`{each.name}`]({each.name}.json)"
        rows.append([link, each.summary, each.audience, each.saves, each.costs, ", ".join(needs) or None])
    return table(rows, "preset | what it is | for | saves | costs | needs")


@block("ds_configs/README.md", "sizes")
def deepspeed_sizes() -> str:
    """What each preset holds, by formula."""
    name, rows = "openai-community/gpt2-xl", []
    model = describe(name, ARCHITECTURES[name].config, use_hub=False)
    for preset in preset_index():
        cells = [f"`{preset}`"]
        for gpus in (1, 8):
            ledger = zero_ledger(load(preset), model, gpus=gpus)
            sizes = (ledger.total_bytes(*places) / GIB for places in (("device",), ("host", "pinned"), ("disk",)))
            cells += [f"{size:.1f}" if size >= 0.05 else "–" for size in sizes]
        rows.append(cells)
    columns = "preset | one GPU: GPU | RAM | disk | eight GPUs: GPU | RAM | disk"
    return f"Of {name}, {model.parameters / 1e9:.2f} B parameters, all of them trained:\n\n{table(rows, columns)}"


@block("recipes/README.md", "recipes")
def recipes() -> str:
    """Every variant of every recipe with the first kind of checkpointing that fits, or the last."""
    rows = []
    for name in resources.names("recipes"):
        recipe, entry, link = load_recipe(name), stored()["recipes"][name], f"[{name}]({name}.yaml)"
        gpu = recipe.card if recipe.gpus == 1 else f"{recipe.gpus} × {recipe.card}"
        shown: dict[tuple[str, bool], StoredPrediction] = {}
        for each in map(StoredPrediction.from_json, entry["predicted"]):
            before = shown.get((each.variant, each.bf16))
            if before is None or str(before.prediction.verdict) == "does not fit":
                shown[each.variant, each.bf16] = each
        for each in shown.values():
            one = each.prediction
            sizes = (one.peak_reserved_bytes[1], (one.host_rss_bytes or 0) + (one.pinned_bytes or 0), one.disk_bytes)
            rows.append(
                [link, gpu if each.bf16 else "T4 (fp16)", each.variant, each.checkpointing or "the preset's",
                 f"{each.micro_batch_size} × {each.accumulation}", each.sequence_length,
                 *(f"{size / GIB:.1f}" if size else None for size in sizes), one.verdict]
            )  # fmt: skip
        for variant, why in dict.fromkeys(map(tuple, entry["not_predicted"])):
            rows.append([link, gpu, variant, *[None] * 3, f"not predicted: {why}", *[None] * 3])
    columns = "batch | sequence length | predicted reserved, GiB | RAM, GiB | disk, GiB | verdict"
    return table(rows, f"recipe | GPU | variant | checkpointing | {columns}")


@block("recipes/README.md", "data")
def data() -> str:
    """What each task's data look like, and which recipes take it."""
    task_of = {name: load_recipe(name).task for name in resources.names("recipes")}
    rows = []
    for name, task in zip(TASKS, map(find_task, TASKS), strict=True):
        users = ", ".join(recipe for recipe, its_task in task_of.items() if its_task == name)
        rows.append([name, task.local_form, f"`{task.reading.EXAMPLE}`", users])
    return table(rows, "task | `--data` | one line of it | recipes")


@dataclass
class Field:
    """A field of a record: its type, what its docstring says, where the number comes from and when it is absent."""

    name: str
    hint: ast.expr
    words: str
    source: str = ""
    absent: str = ""

    def __post_init__(self) -> None:
        self.type = ast.unparse(self.hint)
        self.words, *rest = (text.strip().rstrip(".") for text in re.split(r"\b(Source|Absent):", self.words))
        for part, text in zip(rest[::2], rest[1::2], strict=True):
            setattr(self, part.lower(), text)


@dataclass
class Record:
    """A class of record_types.py: its docstring, the classes that it extends, and its own fields."""

    words: str
    bases: list[str]
    fields: list[Field]


@cache
def record_types() -> dict[str, Record]:
    """The classes of record_types.py by name."""
    body = ast.parse((ROOT / "hf_memkit" / "measuring" / "record_types.py").read_text()).body
    classes: dict[str, Record] = {}
    for node, after in pairwise(body):
        match node:
            case ast.ClassDef(name):
                fields = [
                    Field(a.target.id, a.annotation, b.value.value)
                    for a, b in pairwise(node.body)
                    if isinstance(a, ast.AnnAssign)
                ]
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                classes[name] = Record(ast.get_docstring(node) or "", bases, fields)
            case ast.Assign(value=ast.Call(args=[ast.Constant(name), ast.Dict() as hints])):  # TypedDict(…)
                words, *lines = re.split(r"\n+(?=\w+: )", after.value.value.strip())
                words_of = dict(line.split(": ", 1) for line in lines)
                pairs = zip(hints.keys, hints.values, strict=True)
                classes[name] = Record(words, [], [Field(key.value, hint, words_of[key.value]) for key, hint in pairs])
    return classes


@block("docs/measuring.md", "counters")
def counters() -> str:
    """What readers measure, and where each number comes from."""
    fields = record_types()["Counters"].fields + record_types()["Peaks"].fields
    columns = "field | what it is | source | absent"
    return table(fields, columns, "`{0.name}` | {0.words} | {0.source} | {0.absent}")


@block("docs/measuring.md", "records")
def records() -> str:
    """A section for each kind of record, then one for each class that a field is made of."""
    shared = {"Measured": "[counters and peaks](#counters)", "InputSizes": "[sizes of inputs](#sizes-of-inputs)"}
    titles = {"_Record": "Every record", **{record.__name__: f"`{kind}`" for kind, record in RECORDS.items()}}
    titles |= {name: f"`{name}`" for name in record_types() if name not in {*titles, "Counters", "Peaks", "Measured"}}
    titles["InputSizes"] = "Sizes of inputs"
    sections = []
    for name, title in titles.items():
        record = record_types()[name]
        also = " and ".join(shared[base] for base in record.bases if base in shared)
        words = f"{' '.join(record.words.split())}{f' Also: {also}.' if also else ''}"
        columns = "field | type | what it is | absent"
        of_it = table(record.fields, columns, "`{0.name}` | `{0.type}` | {0.words} | {0.absent}")
        sections.append(f"### {title}\n\n{words}\n\n{of_it}")
    return "\n\n".join(sections)
