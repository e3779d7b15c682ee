"""Blocks of pages that come from the evidence in benchmarks/results: what was measured beside what memkit predicts."""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from docs_blocks import RESULTS, block, filled, shown, table

from benchmarks import published_summary
from benchmarks.gpu_summary import summary
from benchmarks.published_summary import allocated_error, reserved_error, total_error
from hf_memkit.catalog.fit import CONTEXT_SLACK_BYTES
from hf_memkit.common.units import MIB

Row = Mapping[str, Any]
Rows = Callable[[Any], Iterable[Any]] | None


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def source(name: str, text: str = "") -> str:
    """A text, filled from the evidence, and where the evidence is and what made it."""
    content = {"name": name, **read(name)}
    content.setdefault("command", f"python -m benchmarks.{content.get('benchmark')}")
    return filled(f"{text} `benchmarks/results/{{name}}.json`, made by `{{command}}`.".strip(), content)


def show(page: str, name: str, evidence: str, columns: str, template: str, text: str = "", rows: Rows = None) -> None:
    """Registers a table of the evidence's `rows`, or of other rows made of it, with `text` and its source below."""

    def make() -> str:
        content = read(evidence)
        return f"{table(rows(content) if rows else content['rows'], columns, template)}\n\n{source(evidence, text)}"

    block(page, name)(make)


PEAKS = {
    "peak memory of tensors (allocated)": allocated_error,
    "peak of PyTorch's allocator (reserved), outside of the predicted range": reserved_error,
    "peak in nvidia-smi, outside of the predicted range": total_error,
}
"""What others measured → the error of a prediction."""


def percent(share: float | None, digits: int = 0) -> str | None:
    return None if share is None else f"{100 * share:.{digits}f} %"


@block("README.md", "published")
def readme_figures() -> str:
    """Whether it fits, in a sentence; then a line for each kind of figure."""
    rows, fits = read("published")["rows"], read("plan_choices")["fits"]
    tensors = published_summary.errors(allocated_error(row, "then") for row in rows)
    figures = [["peak memory of tensors", tensors.count, percent(tensors.median, 2), percent(tensors.worst, 2)]]
    for name, group in read("plan_speed")["groups"].items():
        count = f"{group['predicted']} of {group['rows']}"
        figures.append([f"step time: {name}", count, percent(group["median"], 2), percent(group["worst"], 2)])
    accepted, refused = fits["ran_and_fit"], len(fits["ran_and_called_not_fitting"])
    full = len(fits["of_these_below_the_whole_gpu"])
    return (
        f"**Does it fit?** {fits['rows']} trainings: {accepted + refused} ran, {fits['out_of_memory']} ran out of "
        f"memory. memkit predicts [*fits*](docs/predict.md#what-fits-means) for {accepted} of the "
        f"{accepted + refused}, and for {len(fits['false_fits']) or 'none'} of the {fits['out_of_memory']}. "
        f"Of the other {refused} that ran, it predicts more than {percent(fits['full_share'])} of the GPU for {full}, "
        f"and more than all of it for {refused - full}: there it was wrong.\n\n"
        f"{table(figures, 'what others measured | predicted, of all | median error | worst error')}"
    )


@block("docs/predict.md", "published")
def published_errors() -> str:
    """How far predictions are off, by what was measured and how the code differs; and what was not predicted."""
    rows = read("published")["rows"]
    codes = {"same": "the same", "near": "differs by less than 1.25 %", "different": "another", None: "not compared"}
    figures = []
    for what, error in PEAKS.items():
        for code, words in codes.items():
            cells = [what, words]
            for which in ("then", "today"):
                found = published_summary.errors(error(row, which) for row in rows if row.get("code") == code)
                cells += [found.count, percent(found.median, 2), percent(found.worst, 2)] if found else [None] * 3
            figures += [cells] if cells[5] else []
    columns = "measured | today's code | trainings, libraries of that day | median | worst | today's | median | worst"
    ran_out = [row["today"].get("verdict") for row in rows if "today" in row and row.get("gib") is None]
    skipped = Counter(f"{row['source'].split()[0]}: {row['not_predicted']}" for row in rows if "not_predicted" in row)
    return (
        f"{table(figures, columns)}\n\nOf the {len(ran_out)} trainings that ran out of memory, "
        f"{ran_out.count('does not fit')} are predicted not to fit.\n\n"
        f"{table(sorted(skipped.items()), 'not predicted: source and reason | trainings')}\n\n"
        f"{source('published', 'Each training with its prediction:')}"
    )


show(
    "docs/comparison.md", "protocol", "published",
    "estimate | trainings | median error | mean error | worst error | would have run out with it as cap | memory that "
    "the cap saves, mean, GiB",
    "{0.name} | {0.errors.count} | {0.errors.median:.2%} | {0.errors.mean:.2%} | {0.errors.worst:.2%} | "
    "{0.too_low} of {0.errors.count} | {0.saved_gib:.1f}",
    rows=lambda content: published_summary.protocol(content["rows"]),
)  # fmt: skip


@block("docs/predict.md", "slack")
def slack() -> str:
    """What the slack of verdicts was fitted on, and how it does on the other half."""
    content = read("published")
    halves = published_summary.calibrations(content["rows"], content["fitted_on"], CONTEXT_SLACK_BYTES / MIB)
    return table(
        [
            {**dataclasses.asdict(half), "models": ", ".join(half.models), "beyond": max(half.worst_mib, 0),
             "trainings": half.below + half.within + half.above}
            for half in halves
        ],
        "half | models | trainings | below the range | within | above | covered with slack | worst beyond it, MiB",
        "{half} | {models} | {trainings} | {below} | {within} | {above} | {covered} | {beyond:.0f}",
    )  # fmt: skip


def trainings_on_our_gpus(folder: Path = RESULTS) -> dict[str, list[Row]]:
    """The GPU of each evidence file of predictions → its measured cases."""
    trainings = {}
    for path in sorted(folder.glob("predict*.json")):
        content = json.loads(path.read_text())
        if content.get("section") == "predict" and not content.get("rehearsal"):
            rows = [row for row in content["cases"] if row["status"] != "predicted"]
            trainings |= {rows[-1]["hardware"]["gpu"]["name"]: rows} if rows else {}
    return trainings


@block("docs/predict.md", "gpu")
def our_gpus(folder: Path = RESULTS) -> str:
    """Predictions beside trainings on GPUs of ours, a row for each GPU."""
    ours = {gpu: summary(rows) for gpu, rows in trainings_on_our_gpus(folder).items()}
    return table(
        [
            {**dataclasses.asdict(one), "gpu": gpu, "wrong": ", ".join(one.wrongly_fits) or "none"}
            for gpu, one in ours.items()
        ],
        "GPU | trainings | peak allocated: median error, worst | peak reserved, outside the range | called fitting, "
        "and did not | ran in exactly the predicted smallest cap, and not in 3 % less | allocator histories followed "
        "to the end | step time, as predicted before | median, with kernels priced since as they took",
        "{gpu} | {cases} | {median_error:.1%}, {worst_error:.1%} ({worst_case}) | {median_reserved_error:.1%}, "
        "{worst_reserved_error:.1%} | {wrong} | {edges_right} of {edges} | {histories_exact} of {histories} | "
        "{median_step_error:.0%}, {worst_step_error:.0%} | {median_step_error_since:.0%}",
    )


@block("README.md", "gpu")
def our_gpus_in_a_line() -> str:
    trainings = trainings_on_our_gpus()
    return filled(
        f"**On our {' and our '.join(trainings)}**: {{0.cases}} trainings. Peak of tensors: median error "
        "{0.median_error:.1%}, worst {0.worst_error:.1%}. Reserved memory was at most {0.worst_reserved_error:.1%} "
        "outside the predicted range ([by GPU](docs/predict.md#on-a-gpu-of-ours)).",
        summary([row for rows in trainings.values() for row in rows]),
    )


@block("docs/predict.md", "equality")
def equality() -> str:
    """The largest error on the CPU: of the architectures that the tracer was made with, and of those kept aside."""
    content = read("predict_equality")
    rows = []
    for half, words in {"known": "known when the tracer was made", "unseen": "not known then"}.items():
        settings = [row.get("now", row) for row in content[half]["rows"]]
        errors = [abs(row["error"]) for row in settings if row.get("error") is not None]
        names = ", ".join(dict.fromkeys(row["architecture"] for row in content[half]["rows"]))
        rows.append([f"{words}: {names}", f"{len(errors)} of {len(settings)}", f"{100 * max(errors):.4f} %"])
    compared = table(rows, "architectures | settings compared | largest error of a peak")
    return f"{compared}\n\n{source('predict_equality', 'The bar is {bar:.1%} of the peak.')}"


@block("docs/techniques/optimizers.md", "optimizer_curves")
def optimizer_curves() -> str:
    """The loss at the end of each optimizer's training, beside its baseline's."""
    arms, rows = read("optimizer_curves")["arms"], []
    for name, arm in arms.items():
        loss, base = arm["held_out"][-1][1], arms.get(arm["baseline"], {}).get("held_out", [[0, None]])[-1][1]
        difference = f"{loss / base - 1:+.2%}".replace("%", " %") if base and name != arm["baseline"] else None
        technique = f"`{arm['technique']}`" if arm["technique"] else None
        rows.append([name, technique, arm["learning_rate"], loss, base, difference])
    curves = table(
        rows,
        "optimizer | technique | learning rate | held-out loss | its baseline's | difference",
        "{0[0]} | {0[1]} | {0[2]:g} | {0[3]:.4f} | {0[4]:.4f} | {0[5]}",
    )
    text = (
        "{steps} steps of {model[batch]} sequences of {model[length]} tokens, {model[layers]} layers of width "
        "{model[width]}, {model[parameters]:,} parameters; text: {text[source]}."
    )
    return f"{curves}\n\n{source('optimizer_curves', text)}"


@block("docs/techniques/optimizers.md", "optimizer_bytes")
def optimizer_bytes() -> str:
    """Bytes of states and gradients of each optimizer, counted after a step."""
    rows: dict[str, dict[str, Any]] = {}
    for row in read("optimizer_bytes")["rows"]:
        share = row["gradient_bytes"] / (4 * row["parameters"])
        rows.setdefault(row["technique"], {"share": share})[row["weights"]] = row
    counted = table(
        rows.values(),
        "technique | model | states, fp32 weights | states, bf16 weights | gradients held, of all",
        "`{float32[technique]}` | {float32[model]} | {float32[state_bytes_a_parameter]:.3f} | "
        "{bfloat16[state_bytes_a_parameter]:.3f} | {share:.0%}",
    )
    return f"{counted}\n\n{source('optimizer_bytes')}"


show(
    "docs/techniques/precision.md", "accumulation", "bf16_accumulation",
    "micro-batches a step | error of the bf16 sum | error of bf16 arithmetic | difference between two batches",
    "{micro_batches} | {sum:.2%} | {arithmetic:.2%} | {noise:.0%}",
    "Norms over all {model[parameters]:,} parameters of a GPT-2 of {model[n_layer]} layers and width {model[n_embd]}, "
    "after {trained[steps]} steps on real text; {micro_batch[sequences]} × {micro_batch[tokens]} tokens each; "
    "medians of {seeds} windows.",
)  # fmt: skip

show(
    "docs/techniques/loading.md", "loading", "loading_ram",
    "load | weights, MiB | the process's own, MiB | file pages, MiB | peak, MiB",
    "{load} | {weights_mib:.0f} | {anonymous_mib:.0f} | {mapped_mib:.0f} | {peak_mib:.0f}",
)  # fmt: skip

show(
    "docs/predict.md", "speed", "predict_speed",
    "model, one sequence of | whole command, s | a second setting in the same process, s | RAM, GiB | peak allocated, "
    "GiB",
    "{model}, {length} tokens | {whole_s:.1f} | {kept_s:.1f} | {ram_gib:.1f} | {answer_gib:.2f}",
    "On {hardware[cpu_count]} CPU cores:",
)  # fmt: skip

show(
    "docs/your-script.md", "overhead", "script_overhead",
    "model | the script's own imports and data | `memkit predict` | more",
    "{model} | {script_alone_s:.1f} s | {predict_s:.1f} s | {more:.1f} s",
    "On {hardware[cpu_count]} CPU cores:",
    rows=lambda content: [{**row, "more": row["predict_s"] - row["script_alone_s"]} for row in content["rows"]],
)  # fmt: skip

show(
    "docs/measuring.md", "overhead", "report_overhead-cpu",
    "with | a step, µs | added, µs | lowest to highest round | inside its own code, µs",
    "{what} | {step_us:.0f} | {added_us:.0f} | {added_us_range[0]:.0f} to {added_us_range[1]:.0f} | {inside_us:.0f}",
    "{model[parameter_tensors]} parameter tensors, {rounds} rounds of {steps} steps. Over {long[steps]:,} steps, "
    "inside, phases and categories on: median {long[first_tenth_median_us]:.0f} µs in the first tenth, "
    "{long[last_tenth_median_us]:.0f} µs in the last.",
    rows=lambda content: content["arms"],
)  # fmt: skip

show(
    "docs/plan.md", "search", "plan_search",
    "model, 16 sequences of 1,024 tokens a step | GPU | the script's preparation | the whole plan | more | setups "
    "judged | of them traced | ended by the limit",
    "{model} | {gpu} | {script_alone_s:.0f} s | {plan_s:.0f} s | {more:.0f} s | {setups} | {traced} | {limit}",
    "On {hardware[cpu_count]} CPU cores:",
    rows=lambda content: [
        {**row, "more": row["plan_s"] - row["script_alone_s"], "setups": row["traced"] + row["excluded"],
         "limit": "yes" if row["stopped"] else "no"}
        for row in content["rows"]
    ],
)  # fmt: skip

show(
    "docs/plan.md", "plan", "plan_speed",
    "rows | predicted | median error | worst | bars | met | of these, on models that nothing was fitted on | median | "
    "worst",
    "{name} | {predicted} of {rows} | {median:.1%} | {worst:.1%} | {bar_median:.0%}, {bar_worst:.0%} | {bars_met} | "
    "{other[predicted]} | {other[median]:.1%} | {other[worst]:.1%}",
    "Each row, and what was decided after a first look at the results:",
    rows=lambda content: [
        {**group, "name": name, "bars_met": "yes" if group["met"] else "**no**",
         "other": content["halves"]["judged on"]["groups"][name]}
        for name, group in content["groups"].items()
    ],
)  # fmt: skip


@block("docs/comparison.md", "peers")
def peers() -> str:
    """What memkit and other tools answer to the same jobs."""
    content, rows = read("predict_speed"), []
    for row in content["rows"]:
        for tool, peer in {"memkit": {"of": "peak allocated, whole", **row}, **row["peers"]}.items():
            answer = f"{peer['answer_gib']:.2f}" if "answer_gib" in peer else "none: it failed"
            job, seconds = f"{row['model']}, {row['length']} tokens", f"{peer['whole_s']:.1f}"
            rows.append([job, tool, answer, peer.get("of"), seconds])
    day = time.strftime("%Y-%m-%d", time.gmtime(content["time"]))
    text = f"On {day}, accelerate {{versions[accelerate]}}, deepspeed {{versions[deepspeed]}}:"
    answers = table(rows, "job | tool | its answer, GiB | what it counts | seconds")
    return f"{answers}\n\n{source('predict_speed', text)}"


@block("docs/plan.md", "example")
def plan_example(which: str = "one", paragraphs: int | None = None) -> str:
    """A plan, as it was typed and answered; of the answer the first paragraphs, or all."""
    content = read("plan_example")
    found = content["examples"][which]
    output = "\n\n".join(found["output"].rstrip().split("\n\n")[:paragraphs]) + "\n…" * bool(paragraphs)
    before, _, behind = shlex.join(found["command"]).replace("'", '"').partition(" -- ")
    command = f"{before} -- \\\n    {behind}".replace(" --", " \\\n    --", before.count(" --"))
    took = f"That took {found['seconds']:.0f} s on {content['hardware']['cpu_count']} CPU cores."
    return f"{shown(command, output)}\n\n{took}"


block("docs/plan.md", "compared")(lambda: plan_example("compared"))
block("README.md", "example")(lambda: plan_example(paragraphs=2))


@block("docs/plan.md", "choices")
def plan_choices() -> str:
    """How often each way to choose is within 5 % of the best, by what differs between the setups of a group."""
    content = read("plan_choices")
    ways, rows = list(content["scores"]["all"]["ways"]), []
    for kind, score in {**content["scores"], "on the whole GPU": content["scores_whole_gpu"]}.items():
        groups = f"{score['groups']}, {score['expressed']}" if "groups" in score else None
        row = [kind, groups, f"{score['cases']}, {score['choices_that_matter']}"]
        for way in (score["ways"][name] for name in ways):
            row.append(f"{percent(way['within_5_percent'] / score['cases'])}, {percent(way['mean_loss'], 1)}")
        rows.append(row)
    columns = f"what differs | groups, of which expressed | choices, of which matter | {' | '.join(ways)}"
    return f"{table(rows, columns)}\n\n{source('plan_choices')}"


@block("docs/plan.md", "fits")
def plan_fits() -> str:
    """Whether what is predicted to fit ran."""
    fits = read("plan_choices")["fits"]
    refused, narrowly = len(fits["ran_and_called_not_fitting"]), len(fits["of_these_below_the_whole_gpu"])
    smaller = fits["smaller_gpus"]
    too_small, otherwise = len(smaller["too_small"]), len(smaller["too_small_with_other_code"])
    figures = {
        "with a prediction of memory": fits["rows"],
        'ran out of memory; of these predicted to fit (a false "fits")':
            f"{fits['out_of_memory']}; {len(fits['false_fits'])}",
        "ran, and predicted to fit": fits["ran_and_fit"],
        f"ran, and predicted not to fit; of these for the last {percent(1 - fits['full_share'])} of the GPU alone":
            f"{refused}; {narrowly}",
        "asked of the smallest GPU on which each is predicted to fit; no room for what it held":
            f"{smaller['rows']}; {too_small}, and {otherwise} whose libraries allocated otherwise then",
        "without a prediction of memory": sum(fits["not_judged"]["memory"].values()),
    }  # fmt: skip
    return table(figures.items(), "published trainings | number")


@block("docs/plan.md", "further-times")
def further_times() -> str:
    """How far step times are off on which nothing was fitted."""
    errors: dict[str, list[float]] = {}
    for row in read("plan_choices")["times"]:
        kind = "Adam in RAM" if row["offload"] else "half precision" if row["half"] else "fp32"
        errors.setdefault(kind, []).append(row["error"])
    rows = (
        (kind, len(all_), statistics.median(map(abs, all_)), min(all_), max(all_)) for kind, all_ in errors.items()
    )
    columns = "trainings | rows | median error | from | to"
    return table(rows, columns, "{0[0]} | {0[1]} | {0[2]:.1%} | {0[3]:+.1%} | {0[4]:+.1%}")


def front_end(name: str, verb: str, lines: int = 14) -> str:
    """What a front end's first training was answered, and how near its trainings came."""
    content = read("front_ends")[name]
    command = shlex.join(["memkit", *content["outputs"][verb]["words"]])
    command = command.replace(" -- ", " -- \\\n    ") if len(command) > 100 else command
    output = content["outputs"][verb]["text"].rstrip().splitlines()
    rows = []
    for job in content["jobs"]:
        errors = [abs(each) for each in job.get("errors", {}).values()]
        error = percent(max(errors), 3) if errors else job.get("not_compared", "not compared")
        rows.append([job["job"], job.get("verdict") or f"refused: {job['refused']}", error])
    versions = next((job["source"] for job in content["jobs"] if "source" in job), "")
    return (
        shown(command, "\n".join([*output[:lines], *["…"] * (len(output) > lines)]))
        + f"\n\nTried with a tiny model, on a CPU ({versions}): predicted beside trained there.\n\n"
        + table(rows, "training | verdict | largest error of a phase")
    )


for _name, _verb in {"trl": "predict", "llama-factory": "plan", "ms-swift": "predict", "axolotl": "plan"}.items():
    block("docs/your-tools.md", _name)(partial(front_end, _name, _verb))
