"""Predicted beside measured: how long trainings of others took for a step, and what memkit says from a trace alone.

    python benchmarks/plan_speed.py                    # all rows; results/plan_speed.json
    python benchmarks/plan_speed.py --stored           # prices what was traced before: after a change of step_time
    python benchmarks/plan_speed.py --new              # the same, and traces only settings that were not traced before
    python benchmarks/plan_speed.py --rows FILE        # other rows in this format; nothing is written

```
published_rows/speed.jsonl ──> plan_speed_child.py (traced: FLOPs, bytes, kernels) ──> step_time ──> results/
                                                              gpu_rates.RATES ─────────────┘
```

One constant of `step_time` was computed from these rows: what a step reaches of the rates, on half of them, split by
model (`published_summary.halves`); `halves` has the errors of that half and of the one that judges it. What was
decided after a first look at them stands in `DECIDED_LATER`. What is known of the rows and not in the prediction:
dequantisation to 16 bits was 1.36 to 2.07 times slower on an A100 in bitsandbytes of that day
(bitsandbytes-foundation/bitsandbytes#1747), and a thread of Trainer's memory metrics ran beside the training
(`fms-*`).

A row's figure is seconds of one optimizer step: of `fms-*` the mean of 100 steps, the first included, which compiles,
allocates and finds algorithms; of `peft-*` the mean of 5,000, of texts about 210 tokens long; of `neusight-*` forward
and backward without an optimizer, the five fastest of 25, each with an empty allocator, so that `cudaMalloc` is in it.
Rows that are no training of a plain transformers on one or two NVIDIA GPUs are left out of the file of rows. Rows of
one setting and several dates are all judged: transformers was another one. Rows of torchtune are not of plain
transformers (`published.py` says how they are traced): they have no bar, and nothing is fitted on them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also runs from a checkout that is not installed

from benchmarks import published_models as models  # noqa: E402
from benchmarks.provenance import RESULTS, provenance  # noqa: E402
from benchmarks.published_models import FOLDER, Row  # noqa: E402
from benchmarks.published_summary import halves  # noqa: E402

if TYPE_CHECKING:
    from hf_memkit.catalog.models import ModelFacts
    from hf_memkit.common.range import Range
    from hf_memkit.deepspeed.traffic import StepTraffic

_ROWS: Final = FOLDER / "speed.jsonl"
_WORKS: Final = RESULTS / "plan_works.json.gz"
_SETTING: Final = (
    "model", "method", "micro_batch", "seq_len", "accumulation", "checkpointing", "attention", "optimizer",
    "weights_dtype", "mixed_precision", "card", "technique",
)  # fmt: skip

_BARS: Final[Mapping[str, tuple[float, float] | None]] = {
    "training, one GPU": (0.08, 0.25),
    "forward and backward, fp32": (0.20, 0.50),
    "training, two GPUs": (0.20, 0.50),
}
"""Median and worst relative error that were asked for before anything was computed."""

DECIDED_LATER: Final = (
    "The first run had a median error of 10.9 % for training on one GPU, nearly all of it too fast, and eight rows of "
    "Mixtral six times too slow.",
    "bf16 products: the lower of the measured rates of bf16 and fp16, of which one is the best of hundreds of shapes "
    "and the other the best of five squares (4.6 % on an A100).",
    "Operations whose tensors fit in half of the L2 cache move at twice the memory's bandwidth; the rows of PEFT's "
    "table were 16 to 21 % too slow.",
    "Mixtral is left out, for the reason that comparable.json gave for memory before.",
    "One trace for QLoRA with and without PEFT's upcast was a mistake of this file.",
    "The high end of the range: rates 15 % lower instead of 10 %.",
    "What a tile costs beside its main loop, before Hopper: nearly all was too fast, short sums most.",
    "The loader's time, measured on another machine: 0.1 to 1 % of these steps.",
    "Rates of the GPU that a row names, as a plan finds them: PCIe versions had those of the module. Two of their "
    "fp32 figures are NeuSight's own measurements of products, median of 67 large ones.",
    "TRL upcasts nothing of QLoRA under FSDP; three rows of two GPUs were traced with the upcast. Their measured "
    "steps are those of the rows without.",
    "What the hooks of FSDP's units take of the host, measured on another machine; the worst of two GPUs was 50.0 %.",
    "Nearly all was too fast still: what a step reaches of the rates was fitted, on one half of the models.",
    "Switch Transformers were left out: NeuSight times the model's own forward pass, and not the one that it puts in "
    "its place for its own prediction.",
)

Found = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", action="store_true", help="of what results/plan_works.json.gz has")
    parser.add_argument("--new", action="store_true", help="traces only settings that it does not have")
    parser.add_argument("--only", default="", metavar="PREFIX", help="rows whose id begins so; nothing is written")
    parser.add_argument("--rows", type=Path, nargs="+", default=[_ROWS])
    options = parser.parse_args(argv)
    read = models.read_rows(*options.rows)
    rows = {name: completed(row) for name, row in read.items() if name.startswith(options.only)}
    traced = stored() if options.stored or options.new else _trace(rows)
    if options.new:
        traced |= _trace({name: row for name, row in rows.items() if first_of_setting(rows).get(name) not in traced})
    answers = answers_of(rows, traced)
    groups = {name: _judged(name, [each for each in answers if each["group"] == name]) for name in _BARS}
    for each in answers:
        _say(each)
    print(json.dumps(groups, indent=1))
    if not options.only and options.rows == [_ROWS]:
        evidence = {
            "command": "python benchmarks/plan_speed.py", **provenance(), "decided_later": DECIDED_LATER,
            "groups": groups, "halves": fitted_and_judged(answers), "rows": answers,
        }  # fmt: skip
        path = RESULTS / "plan_speed.json"
        path.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
        if not options.stored:
            _WORKS.write_bytes(gzip.compress(json.dumps(traced).encode(), mtime=0))
    return 0


def answers_of(rows: Mapping[str, Row], traced: Mapping[str, Found]) -> list[Found]:
    """Each row beside what `step_time` says of it. `traced`: by the id of the first row of a setting."""
    first = first_of_setting(rows)
    return [_answer(row, traced[first[name]] if name in first else {}) for name, row in rows.items()]


def fitted_and_judged(answers: Sequence[Found]) -> dict[str, Found]:
    """Of the half that the share of the rates is fitted on, and of the half that judges it: models, the median of
    their median errors (which the fit brings to 0, as near as a share of whole percents does), and each group."""
    found: dict[str, Found] = {}
    judged = [each for each in answers if "error" in each and each["group"] in _BARS]
    for name, rows in zip(("fitted on", "judged on"), halves(judged), strict=True):
        models_of = sorted({row["model"] for row in rows})
        medians = [statistics.median(row["error"] for row in rows if row["model"] == model) for model in models_of]
        groups = {group: _judged(group, [row for row in rows if row["group"] == group]) for group in _BARS}
        found[name] = {"models": models_of, "median_of_models": statistics.median(medians), "groups": groups}
    return found


def stored() -> dict[str, Found]:
    """What was traced when the evidence was made."""
    found: dict[str, Found] = json.loads(gzip.decompress(_WORKS.read_bytes()))
    return found


def first_of_setting(rows: Mapping[str, Row]) -> dict[str, str]:
    """Of each row that can be expressed: which row is traced for it, the first of the same setting."""
    first: dict[tuple[Any, ...], str] = {}
    return {name: first.setdefault(_setting(row), name) for name, row in rows.items() if why_not(row) is None}


def completed(row: Row) -> Row:
    """A row with what follows from its other fields: the GPU's name here, the types of weights and of autocast."""
    weights, _, mixed = row["dtype"].partition("; mixed precision: ")
    card = row["gpu"].removeprefix("NVIDIA ").removeprefix("Tesla ")
    for said, short in _GPU_NAMES:
        card = card.replace(said, short)
    return {"card": card, "weights_dtype": weights, "mixed_precision": mixed or "none", "fused_loss": "no", **row}


_GPU_NAMES: Final = (
    (" PCIe", ""), (" HBM3", ""), ("-PCIE-", " "), ("-SXM4-", " "), ("-SXM2-", " "), (" 141GB", ""), (" (DGX)", ""),
)  # fmt: skip


def _trace(rows: Mapping[str, Row]) -> dict[str, Found]:
    """What the first row of each setting computes: `{"work"}`, one step, or `{"error"}`."""
    names = list(dict.fromkeys(first_of_setting(rows).values()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(rows[name]) + "\n" for name in names), encoding="utf-8")
        script = [sys.executable, str(ROOT / "benchmarks" / "plan_speed_child.py"), folder]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", models.ROWS: str(path)}
        subprocess.run([*script, *names], env=environment, check=True, capture_output=True)
        return {name: json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def _setting(row: Row) -> tuple[Any, ...]:
    """What decides what is computed."""
    return (models.kind_of(row), *(row.get(key) for key in _SETTING))


def why_not(row: Row) -> str | None:
    """Why a row cannot be expressed with today's libraries."""
    from hf_memkit.catalog.gpu_rates import RATES

    if not row["step_seconds"] or row.get("oom"):
        return "no step was measured"
    if not row["vanilla_hf"] and row.get("code") != "own":
        return "custom kernels"
    if row["card"] not in RATES:
        return f"no rates of {row['card']} are known"
    if row["gpus"] > 1 and row["optimizer"].startswith("none"):
        return "ways of sharding that are none of a Trainer's"
    if models.family_of(row) == "mixtral":
        return (
            "the experts were modules, one after the other, and in 4 bits where the model was; today they are one "
            "parameter, which bitsandbytes leaves as it is, and one grouped product (comparable.json)"
        )
    return None


def _answer(row: Row, traced: Found) -> Found:
    """One row: measured, predicted, the error."""
    from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
    from hf_memkit.prediction import wire
    from hf_memkit.prediction.time.step_time import step_time
    from hf_memkit.prediction.trace.work import Work

    kept = ("id", "source", "model", "method", "micro_batch", "seq_len", "gpus", "gpu", "card", "grade", "versions")
    found: Found = {key: row[key] for key in kept if key in row}
    found |= {"group": _group(row), "measured_s": row["step_seconds"]}
    if (reason := why_not(row)) is not None:
        return {**found, "not_predicted": reason}
    if "error" in traced:
        return {**found, "not_predicted": traced["error"]}
    work = wire.loads(Work, traced["work"])
    predicted = step_time(
        work, _rates(row), capability=KNOWN_GPUS[row["card"]].capability, span=(0, len(work.calls)),
        micro_batches=row["accumulation"],
    )  # fmt: skip
    low, middle, high = predicted.seconds
    if row["gpus"] > 1:
        low, middle, high = _sharded(row, predicted)
    return {
        **found,
        "predicted_s": [low, middle, high],
        "error": middle / row["step_seconds"] - 1,
        "within_range": low <= row["step_seconds"] <= high,
        "by_phase": predicted.by_phase,
        "by_kind": predicted.by_kind,
        "bound_by_launches": predicted.bound_by_launches,
        "unknown": predicted.unknown,
    }


def _rates(row: Row) -> Any:
    """As a plan finds them: by the name that PyTorch reports, where the row has it."""
    from hf_memkit.catalog.gpu_rates import RATES, rates_of

    return rates_of(row["gpu"]) or RATES[row["card"]]


def _sharded(row: Row, one: Any) -> tuple[float, float, float]:
    """Seconds of a step with FSDP's full shard, from those of one GPU that holds everything."""
    from hf_memkit.catalog.host_rates import assumed_host
    from hf_memkit.catalog.models import describe
    from hf_memkit.deepspeed.transfer_time import TracedSeconds, step_cost

    traffic, hooks = fsdp_of(row, describe(row["model"], models.config_of(row), use_hub=False))
    traced = TracedSeconds(one.forward_s, one.backward_s, one.optimizer_s)
    exposed = step_cost(traffic, traced, _rates(row), assumed_host(_CORES)).exposed + hooks
    low, middle, high = (each - one.optimizer_s for each in one.seconds)
    return low + exposed.low, middle + exposed.middle, high + exposed.high


def fsdp_of(row: Row, model: ModelFacts) -> tuple[StepTraffic, Range]:
    """Transfers of FSDP's full shard for a row, and seconds of its units' hooks."""
    from benchmarks.fsdp import UNIT, fsdp_traffic, unit_passes

    adapter, in_4_bits = models.adapter_of(row), row["weights_dtype"].startswith("4-bit")
    # Each matrix of LoRA is a unit of its own (PEFT 0.20: utils/other.py, `fsdp_auto_wrap_policy`).
    targets = adapter["target_modules"] if adapter else ()
    units = 2 * sum(each.name.rpartition(".")[2] in targets for each in model.linears) + model.layers + 1
    # Adapters are a hundredth of the model: what is gathered is the frozen model, as it is stored.
    gathered = model.parameters * (0.5 if in_4_bits else 2)
    traffic = fsdp_traffic(
        replace(model, parameters=0) if adapter else model, gpus=row["gpus"], accumulation=row["accumulation"],
        element_bytes=2, frozen_bytes=round(gathered) if adapter else 0, reentrant=row["checkpointing"],
    )  # fmt: skip
    passes = unit_passes(units, accumulation=row["accumulation"], reentrant=row["checkpointing"])
    return traffic, UNIT.times(passes)


_CORES: Final = 32
"""Of the machine of rows with two GPUs; not published, and nothing of FSDP runs on them."""


def _group(row: Row) -> str:
    if row["optimizer"].startswith("none"):
        return "forward and backward, fp32"
    if row.get("code") == "own":
        return "training with torchtune"
    return {1: "training, one GPU", 2: "training, two GPUs"}.get(row["gpus"], "training, more GPUs")


def _judged(name: str, rows: Sequence[Row]) -> Found:
    """The group's errors beside its bar."""
    errors = [abs(each["error"]) for each in rows if "error" in each]
    found: Found = {"rows": len(rows), "predicted": len(errors)}
    if not errors:
        return found
    found |= {"median": statistics.median(errors), "worst": max(errors)}
    found["within_range"] = sum(each.get("within_range", False) for each in rows)
    bar = _BARS[name]
    if bar is not None:
        found |= {"bar_median": bar[0], "bar_worst": bar[1]}
        found["met"] = found["median"] <= bar[0] and found["worst"] <= bar[1]
    return found


def _say(found: Found) -> None:
    if "error" not in found:
        print(f"{found['id']}: {found['not_predicted'][:120]}")
        return
    low, middle, high = found["predicted_s"]
    print(
        f"{found['id'][:58]:58} measured {found['measured_s']:8.4f} predicted {middle:8.4f} ({low:.3f} to {high:.3f}) "
        f"{found['error']:+7.1%}  launches {found['bound_by_launches']:.0%}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
