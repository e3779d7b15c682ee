"""Of setups that others measured beside one another: which does a plan choose, and what does that choice lose?

    python benchmarks/plan_choices.py            # results/plan_choices.json, from what was traced before
    python benchmarks/plan_choices.py --trace    # traces the further rows anew, which takes minutes

```
groups.jsonl  ─┬─ seconds: results/plan_speed.json, plan_choices_rows.py ─┬─ plan_choices_scores ─┬─> results/
further.jsonl ─┘  memory:  results/published.json ────────────────────────┴─ plan_fits ───────────┘
```

A choice is one group of setups under one cap of memory. The cap is compared with the figure that the group measured,
as it was measured and as it was predicted; of reserved memory with the upper end of the prediction. Of groups with
FSDP, whose memory is not modelled, only the fastest is asked for. Memory is that with the libraries of the row's day
where it was predicted so: what is judged is the choice, not how transformers has changed; `scores_today` has the same
with today's.

Groups differ in kind. Where only the micro-batch differs, the largest that fits is nearly always right, so these are
counted apart. A plan never changes the number of GPUs, and methods only where it is asked to: those groups say whether
times and memory order such setups rightly. No group of `groups.jsonl` that can be expressed has a row without
checkpointing: `_FURTHER` has groups that do, of further.jsonl, at every cap of `_CAPS_GIB` where the answer changes.
Beside the caps stands the whole GPU, on which a plan goes by what it says to fit there (`plan_fits.py`).
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also runs from a checkout that is not installed

from benchmarks import plan_choices_rows, plan_fits  # noqa: E402
from benchmarks.plan_choices_scores import NOISE, PLAN, WITHIN, Setup, case, scores  # noqa: E402
from benchmarks.provenance import RESULTS, provenance  # noqa: E402
from benchmarks.published_models import FOLDER, Row  # noqa: E402
from benchmarks.published_summary import ALLOCATED  # noqa: E402

GROUPS: Final = FOLDER / "groups.jsonl"
_WORKS: Final = RESULTS / "plan_choice_works.json.gz"

_BY_NAME: Final[Mapping[str, str]] = {
    "torchtitan": "torch.compile and float8, which memkit does not trace, in a framework of its own",
    "KempnerForge MoE": "a framework and a model of its own, with expert and tensor parallelism",
    "KempnerForge": "tensor parallelism, in a framework of its own",
    "OpenTau": "a model of its own (pi07) that transformers does not have",
    "NeuSight": "tensor and pipeline parallelism, and no optimizer",
    "fsdp_qlora 2x3090 Yi-34B": "FSDP's offload to RAM is not modelled",
    "fsdp_qlora 2x4090": "FSDP's offload to RAM is not modelled",
    "fsdp_qlora Llama-2-70B": "different machines, whose buses and hosts are not told",
}
"""Groups that cannot be expressed, by how their name begins."""

_FURTHER: Final = (
    ("V100 16GB BERT-large: micro-batch and checkpointing", "hfdoc-v100-", "b4 b1-acc4 b1-acc4-gc"),
    ("V100 16GB BERT-large: checkpointing, precision, optimizer", "hfdoc-v100-",
     "b4 b1-acc4 b1-acc4-gc b4-fp16 b1-acc4-gc-fp16 b4-adafactor b1-acc4-gc-fp16-adafactor b4-adam8bit "
     "b1-acc4-gc-fp16-adam8bit"),
    ("RTX 3090 BERT-large, batch 4: micro-batch and checkpointing", "exp13-3090-", "b4 b1-acc4 b1-acc4-gc"),
    ("RTX 3090 BERT-large, batch 4: checkpointing, precision, optimizer", "exp13-3090-",
     "b4 b1-acc4 b1-acc4-gc b4-fp16 b1-acc4-gc-fp16 b4-adafactor b1-acc4-gc-fp16-adafactor"),
    ("RTX 3090 BERT-large, batch 64: checkpointing", "exp13-3090-", "b8-acc8 b8-acc8-gc"),
    ("RTX 3090 Qwen1.5-0.5B, ZeRO: micro-batch, checkpointing, offload", "gpjt-05b-",
     "seq2048-es b2-es b3-es b1-gc-es b2-gc b3-gc-es b4-gc b1-gc-offload-es b3-gc-offload-es b5-gc-offload-es "
     "b6-gc-offload-es"),
    ("8 x A100 80GB Llama-3-8B, ZeRO: micro-batch, checkpointing, offload", "gpjt-8b-",
     "b1-es b2-es b3-es b1-gc-es b4-gc b8-gc-es b12-gc b13-gc b14-gc-es b1-gc-offload b8-gc-offload b17-gc-offload "
     "b18-gc-offload"),
)  # fmt: skip
"""Groups of rows of further.jsonl: of BERT-large with one effective batch, of the others without accumulation."""

_CAPS_GIB: Final = (4, 6, 8, 10, 12, 16, 24, 32, 40, 48, 80)

DECIDED_LATER: Final = (
    "Where several setups are within the noise, each counts by its share, as a plan takes the one that changes the "
    "script least. Before, the fastest by however little was taken: that hid what groups of two RTX 3090 and three of "
    "santacoder's QLoRA lose.",
    "The machine with eight A100 has the cores of a server, not of a desktop: only the times of Adam in RAM changed, "
    "and no choice.",
    "RAM that nobody measured was as fast as copies count, and Adam on the host updates in place: 1.5 times that.",
    "FSDP's hooks and QLoRA without an upcast, as in plan_speed.py.",
    "Under DeepSpeed before 0.19.4 and outside zero.Init, linear layers hold what ZeRO-3 gathers: 13 GiB of "
    "Llama-3-8B on eight GPUs without checkpointing, which were missing at 40 and 80 GiB.",
)
"""After a first look at results."""

Found = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="trace the further rows anew")
    options = parser.parse_args(argv)
    if options.trace:
        works = plan_choices_rows.traced(plan_choices_rows.further().values())
        _WORKS.write_bytes(gzip.compress(json.dumps(works).encode(), mtime=0))
    found = {"command": "python benchmarks/plan_choices.py", **provenance(), **evidence()}
    (RESULTS / "plan_choices.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    _say(found)
    return 0


def evidence() -> Found:
    """All groups with what is chosen; the scores; what fits."""
    groups = [*_published(), *_further_groups()]
    seconds, memory = _seconds(), _read(RESULTS / "published.json")["rows"]
    fits = plan_fits.judged(memory)
    on_gpu = {each["id"]: each["fits"] for each in fits}
    found = [_group(each, seconds, _memory(memory, "then"), on_gpu) for each in groups]
    today = [_group(each, seconds, _memory(memory, "today"), on_gpu) for each in groups]
    return {
        "decided_later": DECIDED_LATER,
        "within": WITHIN,
        "noise": NOISE,
        "scores": _by_kind(found),
        "scores_today": _by_kind(today),
        "scores_whole_gpu": scores(each["whole_gpu"] for each in found if "whole_gpu" in each),
        "times": _times(found),
        "groups": found,
        "fits": {**plan_fits.summary(fits), "not_judged": plan_fits.not_judged(memory, found)},
        "fits_rows": fits,
    }


def kind_of(group: Row) -> str:
    """What differs between its rows."""
    if "kind" in group:
        return str(group["kind"])
    name = group["name"]
    if name.endswith(": micro-batch"):
        return "micro-batch"
    if name.endswith(": number of GPUs"):
        return "number of GPUs"
    return "method" if ": method" in name else "sharding"


def why_not(group: Row, seconds: Mapping[str, float]) -> str:
    """Why a group cannot be expressed; empty: it can."""
    for begin, reason in _BY_NAME.items():
        if group["name"].startswith(begin):
            return reason
    if "Mixtral" in group["model"]:
        return "Mixtral's experts were modules then and are one parameter today, of another size in 4 bits"
    own = [each for each in group["rows"] if _own_kernels(each)]
    if own:
        return f"{len(own)} of {len(group['rows'])} rows run kernels of their own (FOAK, GPTQ)"
    missing = [each["id"] for each in group["rows"] if each["id"] not in seconds]
    return f"no time is predicted of {', '.join(missing)}" if missing else ""


def _own_kernels(row: Row) -> bool:
    return not row["vanilla_hf"] and row["id"].startswith("fms-")


def _published() -> list[Row]:
    return [json.loads(line) for line in GROUPS.read_text(encoding="utf-8").splitlines()]


def _further_groups() -> list[Row]:
    """Those of `_FURTHER`, as the published ones are."""
    rows = plan_choices_rows.further()
    found: list[Row] = []
    for name, begin, ends in _FURTHER:
        members = [rows[begin + end] for end in ends.split()]
        facts = [
            {
                "id": row["id"], "speed": _samples_per_second(row), "gib": row["gib"], "vanilla_hf": True,
                "outcome": row.get("outcome", "ran"),
                **{key: row[key] for key in ("gpus", "micro_batch", "accumulation", "checkpointing")},
            }
            for row in members
        ]  # fmt: skip
        found.append({
            "name": name, "kind": "ZeRO" if "ZeRO" in name else "checkpointing", "metric": "samples_per_second",
            "model": members[0]["model"], "gpu": members[0]["gpu"], "gpus": [members[0]["gpus"]], "rows": facts,
            "caps_gib": _caps(facts), "memory_measure": members[0]["measured"],
            "sources": sorted({row["source"] for row in members}),
        })  # fmt: skip
    return found


def _samples_per_second(row: Row) -> float | None:
    """Of all GPUs; None: it ran out of memory."""
    also = row["also"] if row["gib"] is not None else {}
    if "steps_per_second" in also:
        return float(also["steps_per_second"] * row["micro_batch"] * row["accumulation"] * row["gpus"])
    return also.get("samples_per_second")


def _caps(rows: Sequence[Row]) -> dict[str, str]:
    """The caps at which the best that fits is another than below, as in groups.jsonl."""
    found: dict[str, str] = {}
    for cap in _CAPS_GIB:
        fitting = [each for each in rows if each["gib"] is not None and each["gib"] <= cap]
        best = max(fitting, key=lambda each: each["speed"])["id"] if fitting else None
        if best is not None and best not in list(found.values())[-1:]:
            found[str(cap)] = best
    return found


def _seconds() -> dict[str, float]:
    """Predicted, of one optimizer step, by id."""
    speed = _read(RESULTS / "plan_speed.json")["rows"]
    found = {row["id"]: row["predicted_s"][1] for row in speed if "predicted_s" in row}
    works = json.loads(gzip.decompress(_WORKS.read_bytes()))
    for name, row in plan_choices_rows.further().items():
        if "work" in works.get(name, {}):
            found.setdefault(name, plan_choices_rows.seconds_of(row, works[name])[1])
    return found


def _memory(rows: Iterable[Row], first: str) -> dict[str, tuple[float, float]]:
    """Predicted, by id: (peak allocated, most that is reserved), with the libraries that are named, or with the
    others."""
    found = {}
    for row in rows:
        for which in (first, "then", "today"):
            answer = row.get(which, {})
            if "peak_reserved_gib" in answer:
                found[row["id"]] = answer["peak_allocated_gib"], answer["peak_reserved_gib"][1]
                break
    return found


def _group(
    group: Row,
    seconds: Mapping[str, float],
    memory: Mapping[str, tuple[float, float]],
    fits: Mapping[str, bool],
) -> Found:
    kept = ("name", "model", "gpu", "gpus", "metric", "memory_measure", "choice_class", "sources")
    found: Found = {**{key: group[key] for key in kept if key in group}, "kind": kind_of(group)}
    if reason := why_not(group, seconds):
        out = [each["id"] for each in group["rows"] if each["outcome"] == "out_of_memory"]
        return {**found, "expressed": None, "reason": reason, **({"out_of_memory": out} if out else {})}
    rows = group["rows"]
    modelled = all(each["id"] in memory for each in rows)
    setups = [_setup(each, group, seconds, memory) for each in rows]
    caps: list[float | None] = [float(each) for each in group["caps_gib"]] if modelled else [None]
    silent = found["kind"] == "number of GPUs"
    return {
        **found,
        "expressed": "speed and memory" if modelled else "speed alone",
        **({} if modelled else {"reason": "what FSDP leaves of memory is not modelled"}),
        "rows": [
            {
                "id": each.name, "speed": each.speed, "predicted_speed": each.predicted_speed, "gib": each.gib,
                "predicted_gib": each.predicted_gib, "micro_batch": each.micro_batch,
                "checkpointing": each.checkpointing,
            }
            for each in setups
        ],
        "cases": [case(setups, cap, silent=silent) for cap in caps],
        **({"whole_gpu": case([replace(each, fits=fits[each.name]) for each in setups], None)} if modelled else {}),
    }  # fmt: skip


def _setup(row: Row, group: Row, seconds: Mapping[str, float], memory: Mapping[str, tuple[float, float]]) -> Setup:
    samples = row["micro_batch"] * row["accumulation"] * row["gpus"]
    units = samples
    if group["metric"] == "tokens_per_second":  # of one GPU
        units = round(row["speed"] * row["step_seconds"])
    allocated, reserved = memory.get(row["id"], (None, None))
    return Setup(
        name=row["id"],
        speed=row["speed"],
        predicted_speed=units / seconds[row["id"]],
        gib=row["gib"],
        predicted_gib=allocated if group["memory_measure"] in ALLOCATED else reserved,
        micro_batch=row["micro_batch"],
        checkpointing=bool(row["checkpointing"]),
    )


def _by_kind(groups: Sequence[Found]) -> Found:
    """Of each kind, and of all that are no mere micro-batches."""
    kinds = list(dict.fromkeys(each["kind"] for each in groups))
    others = [each for each in kinds if each != "micro-batch"]
    published = [each for each in others if each not in ("checkpointing", "ZeRO")]
    asked = {**{each: [each] for each in kinds}, "published, without micro-batch": published}
    asked |= {"all but micro-batch": others, "all": kinds}
    found: Found = {}
    for name, of in asked.items():
        expressed = [each for each in groups if each["kind"] in of and each["expressed"]]
        cases = [each for group in expressed for each in group["cases"]]
        found[name] = {
            "groups": sum(each["kind"] in of for each in groups), "expressed": len(expressed), **scores(cases),
            "where_it_matters": scores(each for each in cases if each["worst_loss"] > WITHIN),
        }  # fmt: skip
    return found


def _times(groups: Sequence[Found]) -> list[Found]:
    """Seconds of a step, predicted over measured, less 1, of the further rows; nothing was fitted on them."""
    rows = {each["id"]: each for group in groups for each in group.get("rows", ())}
    found = []
    for name, row in plan_choices_rows.further().items():
        each = rows.get(name)
        if each is not None and each["speed"]:
            found.append({
                "id": name, "gpu": row["gpu"], "gpus": row["gpus"], "half": not _is_fp32(row),
                "offload": "offload_optimizer" in row.get("zero", {}).get("zero_optimization", {}),
                "error": each["speed"] / each["predicted_speed"] - 1,
            })  # fmt: skip
    return found


def _is_fp32(row: Row) -> bool:
    return bool(row["weights_dtype"] == "float32" and row["mixed_precision"].startswith("none"))


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _say(found: Found) -> None:
    for group in found["groups"]:
        for each in group.get("cases", ()):
            plan = each["ways"][PLAN]
            if max(plan["losses"]) > WITHIN:
                cap = f"{each['cap_gib']:g} GiB" if each["cap_gib"] else "whole GPU"
                losses = ", ".join(f"{loss:.1%}" for loss in plan["losses"])
                print(f"missed: {group['name']}, {cap}: {', '.join(plan['choices'])} for {each['best']}: {losses}")
    print("on the whole GPU:", json.dumps(found["scores_whole_gpu"], indent=1))
    for which in ("scores", "scores_today"):
        for kind, said in found[which].items():
            print(f"{which}, {kind}: {said['expressed']} of {said['groups']} groups, {said['cases']} choices")
            for way, score in said["ways"].items():
                print(f"    {way:32} {score['within_5_percent']:6.2f} {score['within_3_percent']:6.2f} "
                      f"{score['mean_loss']:.1%} {score['worst_loss']:.1%}")  # fmt: skip
    print(json.dumps(found["fits"], indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
