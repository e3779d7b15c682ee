"""Blocks of pages that come from the evidence in benchmarks/results: what was measured beside what memkit predicts."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs_blocks import RESULTS, block, shown, table

from benchmarks import published_summary
from benchmarks.gpu_summary import Summary, summary
from benchmarks.published_summary import allocated_error, reserved_error, total_error
from hf_memkit.common.units import GB, GIB

Row = Mapping[str, Any]

MEASURED = {
    "peak memory of tensors (allocated)": allocated_error,
    "peak of PyTorch's allocator (reserved), outside of the predicted range": reserved_error,
    "peak in nvidia-smi, outside of the predicted range": total_error,
}
"""What others measured → the function that returns the error of a prediction."""

CODES = {
    "same": "the same",
    "near": "differs by less than 1.25 %",
    "different": "another",
    "own": "torchtune's, by a Trainer",
    None: "not compared",
}
"""How today's library allocates, compared with the library of the training → words for the page."""


def read(name: str) -> Any:
    """An evidence file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def percent(share: float | None, digits: int = 0) -> str | None:
    return None if share is None else f"{100 * share:.{digits}f} %"


def source(name: str) -> str:
    """The evidence file, and the command that made it."""
    command = read(name).get("command", f"python -m benchmarks.{name}")
    return f"`benchmarks/results/{name}.json`, made by `{command}`."


@block("README.md", "published")
def readme_figures() -> str:
    """Whether trainings fit, in a paragraph; then a table of the other figures."""
    fits = read("plan_choices")["fits"]
    false_fits = len(fits["false_fits"]) or "none"
    refused = len(fits["ran_and_called_not_fitting"])
    ran = fits["ran_and_fit"] + refused
    nearly_full = len(fits["of_these_below_the_whole_gpu"])
    sentences = [
        f"**Does it fit?** {fits['rows']} trainings: {ran} ran, {fits['out_of_memory']} ran out of memory.",
        f"memkit predicts [*fits*](docs/predict.md#what-fits-means) for {fits['ran_and_fit']} of the {ran},",
        f"and for {false_fits} of the {fits['out_of_memory']}.",
        f"Of the other {refused} that ran, it predicts more than {percent(fits['full_share'])} of the GPU for",
        f"{nearly_full}, and more than all of it for {refused - nearly_full}: there it was wrong.",
    ]

    tensors = published_summary.errors(allocated_error(row, "then") for row in read("published")["rows"])
    compiled = published_summary.errors(
        allocated_error(row, "today") for row in read("published")["rows"] if "compile" in row
    )
    assert tensors is not None and compiled is not None
    rows = [
        ["peak memory of tensors", tensors.count, percent(tensors.median, 2), percent(tensors.worst, 2)],
        ["… with torch.compile", compiled.count, percent(compiled.median, 2), percent(compiled.worst, 2)],
    ]
    for name, group in read("plan_speed")["groups"].items():
        count = f"{group['predicted']} of {group['rows']}"
        rows.append([f"step time: {name}", count, percent(group["median"], 2), percent(group["worst"], 2)])
    figures = table("what others measured | predicted, of all | median error | worst error", rows)
    return f"{' '.join(sentences)}\n\n{figures}"


@block("docs/predict.md", "published")
def published_errors() -> str:
    """How far predictions are off, by what was measured and how today's code differs; and what was not predicted."""
    trainings = read("published")["rows"]

    rows = []
    for measured, error in MEASURED.items():
        for code, words in CODES.items():
            of_code = [row for row in trainings if row.get("code") == code]
            then = error_cells([error(row, "then") for row in of_code])
            today = error_cells([error(row, "today") for row in of_code])
            if any(today):
                rows.append([measured, words, *then, *today])
    columns = "measured | today's code | trainings, libraries of that day | median | worst | today's | median | worst"
    figures = table(columns, rows)

    ran_out = [row["today"].get("verdict") for row in trainings if "today" in row and row.get("gib") is None]
    right = ran_out.count("does not fit")
    sentence = f"Of the {len(ran_out)} trainings that ran out of memory, {right} are predicted not to fit."

    not_predicted = [row for row in trainings if "not_predicted" in row]
    reasons = Counter(f"{row['source'].split()[0]}: {row['not_predicted']}" for row in not_predicted)
    skipped = table("not predicted: source and reason | trainings", sorted(reasons.items()))
    return f"{figures}\n\n{sentence}\n\n{skipped}\n\nEach training with its prediction: {source('published')}"


def error_cells(errors: Sequence[float | None]) -> list[Any]:
    """Three cells: number of trainings, median error, worst error."""
    figures = published_summary.errors(errors)
    if figures is None:
        return [None, None, None]
    return [figures.count, percent(figures.median, 2), percent(figures.worst, 2)]


@block("docs/techniques/compile.md", "published")
def compiled_by_others() -> str:
    """Compiled trainings that others measured, each beside its prediction, with the tensors that differ."""
    content = read("published")
    trainings = [row for row in content["rows"] if row.get("code") == "own"]
    steps = {row["id"]: row for row in read("plan_speed")["rows"]}

    rows = []
    for row in trainings:
        error = allocated_error(row, "today")
        if error is None:
            continue
        predicted = f"{row['today']['peak_allocated_gib']:.2f}"
        batch = f"{row['micro_batch']} × {row['seq_len']}"
        step = steps[row["id"]]
        low, middle, high = step["predicted_s"]
        seconds = f"{step['measured_s']:.2f} → {middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append([row["technique"], batch, row["gib"], predicted, signed_percent(error), seconds, row["why"]])
    figures = table(
        "torchtune | batch | measured, GiB | predicted, GiB | error | a step, s: measured → predicted | its code", rows
    )

    versions = {row["versions"]["torch"] for row in trainings if "today" in row}
    then, today = ", ".join(sorted(versions)), content["versions"]["torch"].partition("+")[0]
    within = [steps[row["id"]]["within_range"] for row in trainings if "today" in row]
    sentence = (
        f"Measured with torch {then}, predicted with {today}. {sum(within)} of {len(within)} steps took a time in the "
        "predicted range."
    )
    reasons = Counter(row["not_predicted"] for row in trainings if "not_predicted" in row)
    skipped = table("not predicted: reason | trainings", sorted(reasons.items()))
    return f"{figures}\n\n{sentence}\n\n{skipped}\n\n{source('published')} Steps: {source('plan_speed')}"


def signed_percent(share: float) -> str:
    text = f"{100 * share:+.1f} %"
    return "0.0 %" if text[1:] == "0.0 %" else text.replace("-", "−")


@block("docs/techniques/compile.md", "gpu")
def compiled_on_our_gpus() -> str:
    """Compiled trainings on our GPUs, each beside its predictions with one version of torch or more."""
    rows = []
    for gpu, trainings in trainings_on_our_gpus().items():
        for row in trainings:
            for version, since in row.get("predicted_since", {}).items():
                torch = [row["versions"]["torch"], version.partition("+")[0]]
                rows.append([f"{gpu}: {row['case']}", *torch, *compiled_cells(row, since)])
    columns = (
        "training | measured with torch | predicted with | peak allocated, GiB | in forward | in backward | "
        "peak reserved, GiB | a step, ms"
    )
    legend = "Each cell: measured → predicted."
    return f"{table(columns, rows)}\n\n{legend} `benchmarks/results/predict-h200.json`, made by `benchmarks/gpu.py`."


@block("docs/predict.md", "fsdp2")
def fsdp2_on_our_gpu() -> str:
    """Trainings with FSDP2 on our GPU, each beside its prediction."""
    evidence = read("fsdp2-h200")
    rows = []
    for row in evidence["rows"]:
        allocated = max(step["peak_allocated_bytes"] for step in row["steps"]) / GIB
        reserved = max(step["reserved_bytes"] for step in row["steps"]) / GIB
        low, high = row["prediction"]["peak_reserved_gib"]
        rows.append(
            [
                "compiled" if row["torch_compile"] else "eager",
                beside(allocated, row["prediction"]["peak_allocated_gib"]),
                f"{reserved:.2f} → {low:.2f} to {high:.2f}",
            ]
        )
    figures = table("training | peak allocated, GiB | peak reserved, GiB", rows)

    versions = evidence["torch"].partition("+")[0], evidence["predicted_on"]["versions"]["torch"].partition("+")[0]
    legend = f"Each cell: measured with torch {versions[0]} → predicted with {versions[1]}. {evidence['what']}."
    return f"{figures}\n\n{legend} `benchmarks/results/fsdp2-h200.json`, predicted by `python benchmarks/fsdp2.py`."


SHARDING_COLUMNS = (
    "GPUs | setup | weights | gradients | optimizer | activations, loss | buffers | peak in | reserved | verdict | "
    "RAM | sent, GB | a step, s"
)


@block("docs/fsdp.md", "sharding")
def sharding_on_fast_links() -> str:
    """One training on 2, 4 and 8 GPUs, by engine."""
    evidence = read("sharding")
    rows = [row for row in evidence["rows"] if row["gpu"] == "H100 80GB" and "micro-batches" not in row["setup"]]
    named = ("memkit", "torch", "transformers", "accelerate", "deepspeed")
    versions = ", ".join(f"{name} {evidence['versions'][name].partition('+')[0]}" for name in named)
    return f"{sharding_table(rows)}\n\nPredicted with {versions}; nothing was measured. {source('sharding')}"


@block("docs/fsdp.md", "links")
def sharding_on_slow_links() -> str:
    """The same training on GPUs that exchange over PCIe."""
    return sharding_table([row for row in read("sharding")["rows"] if row["gpu"] == "RTX 4090"])


@block("docs/fsdp.md", "accumulation")
def sharding_with_accumulation() -> str:
    """The same training with two micro-batches a step."""
    return sharding_table([row for row in read("sharding")["rows"] if "micro-batches" in row["setup"]])


def sharding_table(rows: Sequence[Row]) -> str:
    return table(SHARDING_COLUMNS, [sharding_cells(row) for row in rows])


def sharding_cells(row: Row) -> list[str]:
    """A cell for each of `SHARDING_COLUMNS`; sizes are GiB if the column has no unit."""
    held = {name.removesuffix("_gib"): gib for name, gib in row["categories"].items()}
    sizes = (
        held["weights"],
        held["gradients"],
        held["optimizer"],
        held["activations"] + held["loss"],
        held["buffers"],
    )
    low, high = row["peak_reserved_gib"]
    seconds = row["step_s"]
    reserved = f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"
    return [
        f"{row['gpus']} × {row['gpu']}",
        row["setup"],
        *(f"{gib:.1f}" for gib in sizes),
        row["peak_phase"],
        reserved,
        row["verdict"],
        f"{row['ram_gib']:.0f}",
        f"{row['sent_bytes'] / GB:.1f}",
        f"{seconds[1]:.2f} ({seconds[0]:.2f} to {seconds[2]:.2f})",
    ]


def compiled_cells(row: Row, since: Row) -> list[str]:
    prediction = since["prediction"]
    cells = [beside(row["peak_allocated_gib"], prediction["peak_allocated_gib"])]
    for phase in ("forward", "backward"):
        cells.append(beside(row["phases"][phase], prediction["phases"][phase]["peak_allocated_gib"]))
    low, high = prediction["peak_reserved_gib"]
    cells.append(f"{row['peak_reserved_gib']:.2f} → {low:.2f} to {high:.2f}")
    low, middle, high = (1000 * seconds for seconds in since["step_s"])
    cells.append(f"{row['step_time_ms']:.0f} → {middle:.0f} ({low:.0f} to {high:.0f})")
    return cells


def beside(measured: float, predicted: float) -> str:
    return f"{measured:.3f} → {predicted:.3f} ({signed_percent(predicted / measured - 1)})"


@block("docs/comparison.md", "protocol")
def estimates_as_limits() -> str:
    """How good the estimates of memkit and of other tools are as memory limits."""
    rows = []
    for one in published_summary.protocol(read("published")["rows"]):
        errors = one.errors
        shares = [percent(each, 2) for each in (errors.median, errors.mean, errors.worst)]
        rows.append([one.name, errors.count, *shares, f"{one.too_low} of {errors.count}", f"{one.saved_gib:.1f}"])
    columns = (
        "estimate | trainings | median error | mean error | worst error | would have run out with it as cap | "
        "memory that the cap saves, mean, GiB"
    )
    return f"{table(columns, rows)}\n\n{source('published')}"


def trainings_on_our_gpus(folder: Path = RESULTS) -> dict[str, list[Row]]:
    """GPU → the cases that were measured on it."""
    trainings = {}
    for path in sorted(folder.glob("predict*.json")):
        content = json.loads(path.read_text())
        if content.get("section") != "predict" or content.get("rehearsal"):
            continue
        measured = [row for row in content["cases"] if row["status"] != "predicted"]
        if measured:
            trainings[measured[-1]["hardware"]["gpu"]["name"]] = measured
    return trainings


@block("docs/predict.md", "gpu")
def our_gpus(folder: Path = RESULTS) -> str:
    """Predictions beside trainings on our GPUs, a row for each GPU."""
    columns = (
        "GPU | trainings | peak allocated: median error, worst | peak reserved, outside the range | called fitting, "
        "and did not | ran in exactly the predicted smallest cap, and not in 3 % less | allocator histories followed "
        "to the end | step time, as predicted before | median, with kernels priced since as they took"
    )
    rows = [gpu_cells(gpu, summary(cases)) for gpu, cases in trainings_on_our_gpus(folder).items()]
    return table(columns, rows)


def gpu_cells(gpu: str, figures: Summary) -> list[Any]:
    allocated = f"{percent(figures.median_error, 1)}, {percent(figures.worst_error, 1)} ({figures.worst_case})"
    reserved = f"{percent(figures.median_reserved_error, 1)}, {percent(figures.worst_reserved_error, 1)}"
    step_time = None
    if figures.median_step_error is not None:
        step_time = f"{percent(figures.median_step_error)}, {percent(figures.worst_step_error)}"
    return [
        gpu,
        figures.cases,
        allocated,
        reserved,
        ", ".join(figures.wrongly_fits) or "none",
        f"{figures.edges_right} of {figures.edges}",
        f"{figures.histories_exact} of {figures.histories}",
        step_time,
        percent(figures.median_step_error_since),
    ]


@block("README.md", "gpu")
def our_gpus_in_a_line() -> str:
    trainings = trainings_on_our_gpus()
    figures = summary([row for rows in trainings.values() for row in rows])
    return (
        f"**On our {' and our '.join(trainings)}**: {figures.cases} trainings. "
        f"Peak of tensors: median error {percent(figures.median_error, 1)}, worst {percent(figures.worst_error, 1)}. "
        f"Reserved memory was at most {percent(figures.worst_reserved_error, 1)} outside the predicted range "
        "([by GPU](docs/predict.md#on-a-gpu-of-ours))."
    )


@block("docs/predict.md", "equality")
def equality() -> str:
    """The largest error on the CPU: of the architectures that the tracer was made with, and of those kept aside."""
    content = read("predict_equality")
    rows = []
    for half, words in {"known": "known when the tracer was made", "unseen": "not known then"}.items():
        settings = content[half]["rows"]
        names = ", ".join(dict.fromkeys(row["architecture"] for row in settings))
        errors = [row.get("now", row).get("error") for row in settings]
        compared = [abs(error) for error in errors if error is not None]
        rows.append([f"{words}: {names}", f"{len(compared)} of {len(settings)}", percent(max(compared), 4)])
    figures = table("architectures | settings compared | largest error of a peak", rows)
    return f"{figures}\n\nThe bar is {percent(content['bar'], 1)} of the peak. {source('predict_equality')}"


@block("docs/techniques/optimizers.md", "optimizer_curves")
def learning_curves() -> str:
    """The held-out loss at the end of each optimizer's training, beside its baseline's."""
    arms = read("optimizer_curves")["arms"]
    rows = []
    for name, arm in arms.items():
        loss = arm["held_out"][-1][1]
        base = arms[arm["baseline"]]["held_out"][-1][1]
        rows.append([name, f"{arm['learning_rate']:g}", f"{loss:.4f}", f"{base:.4f}", percent(loss / base - 1, 2)])
    columns = "optimizer | learning rate | held-out loss | its baseline's | difference"
    return f"{table(columns, rows)}\n\n{source('optimizer_curves')}"


@block("docs/plan.md", "plan")
def step_times() -> str:
    """Errors of predicted step times: of all rows, and of those on models that nothing was fitted on."""
    content = read("plan_speed")
    judged = content["halves"]["judged on"]["groups"]
    rows = []
    for name, group in content["groups"].items():
        bars = f"{percent(group['bar_median'])}, {percent(group['bar_worst'])}"
        met = "yes" if group["met"] else "**no**"
        other = judged[name]
        all_of_them = [f"{group['predicted']} of {group['rows']}", *median_and_worst(group), bars, met]
        rows.append([name, *all_of_them, other["predicted"], *median_and_worst(other)])
    columns = (
        "rows | predicted | median error | worst | bars | met | of these, on models that nothing was fitted on | "
        "median | worst"
    )
    what = "Each row, and what was decided after a first look at the results"
    return f"{table(columns, rows)}\n\n{what}: {source('plan_speed')}"


def median_and_worst(group: Row) -> list[str | None]:
    return [percent(group["median"], 1), percent(group["worst"], 1)]


@block("docs/plan.md", "choices")
def plan_choices() -> str:
    """How often each way to choose is within 5 % of the best, and how much speed it loses in the mean."""
    content = read("plan_choices")
    all_choices = content["scores"]["all"]
    matter = all_choices["where_it_matters"]
    whole_gpu = content["scores_whole_gpu"]
    rows = []
    for name in all_choices["ways"]:
        cells = [name]
        for choices in (all_choices, matter, whole_gpu):
            way = choices["ways"][name]
            cells += [percent(way["within_5_percent"] / choices["cases"]), percent(way["mean_loss"], 1)]
        rows.append(cells)
    columns = (
        f"way to choose | within 5 % of the best, of {all_choices['cases']} choices | speed lost | of the "
        f"{matter['cases']} that matter | speed lost | of {whole_gpu['cases']} on the whole GPU | speed lost"
    )
    return f"{table(columns, rows)}\n\n{source('plan_choices')}"


def plan_answer(name: str, paragraphs: int | None = None) -> str:
    """A command and its answer, or the answer's first paragraphs."""
    content = read("plan_example")
    example = content["examples"][name]
    ours, script = shlex.join(example["command"]).replace("'", '"').split(" -- ")
    if len(ours) > 80:
        ours = ours.replace(" --", " \\\n    --")
    output = example["output"].rstrip()
    if paragraphs is not None:
        output = "\n\n".join(output.split("\n\n")[:paragraphs]) + "\n…"
    command = f"{ours} -- \\\n    {script}"
    if paragraphs is not None:
        return shown(command, output)
    took = f"That took {example['seconds']:.0f} s on {content['hardware']['cpu_count']} CPU cores."
    return f"{shown(command, output)}\n\n{took}"


block("README.md", "example")(lambda: plan_answer("first", paragraphs=2))
block("docs/plan.md", "example")(lambda: plan_answer("one"))
block("docs/plan.md", "compared")(lambda: plan_answer("compared"))


def front_end(name: str, verb: str, lines: int = 14) -> str:
    """The command of a front end's first training, and the first lines of memkit's answer."""
    output = read("front_ends")[name]["outputs"][verb]
    command = shlex.join(["memkit", *output["words"]]).replace(" -- ", " -- \\\n    ")
    answer = output["text"].rstrip().splitlines()
    if len(answer) > lines:
        answer = [*answer[:lines], "…"]
    return shown(command, "\n".join(answer))


FRONT_ENDS = {"trl": "predict", "llama-factory": "plan", "axolotl": "plan", "ms-swift": "predict"}
for _name, _verb in FRONT_ENDS.items():
    block("docs/your-tools.md", _name)(lambda name=_name, verb=_verb: front_end(name, verb))
