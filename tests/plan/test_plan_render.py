"""What a person reads on a terminal of 80 columns."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.answer.terminal import render
from hf_memkit.plan import wording
from hf_memkit.plan.answer import plan_answer, plans_json
from hf_memkit.plan.make_plan import _gpu_variant_notes
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.plan_file import plan_text
from tests.plan.made_plans import ALLOCATOR, CHECKPOINTING, EIGHT_BITS, PATCH, SDPA, plan, setup, typical_plan
from tests.plan.made_trainings import MADE, changed


def shown(results: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(results, crop=False)
    lines = str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    copied = "      "  # a line of Python, which is not broken
    assert max(len(line) for line in lines if not line.startswith(copied)) <= width
    return lines


def view(made: Plan, width: int, *, short: bool = False) -> RenderableType:
    return render(plan_answer([made], {}), width, short=short)


def compared_view(
    plans: Sequence[Plan], prices: Mapping[str, float], width: int, *, short: bool = False
) -> RenderableType:
    return render(plan_answer(plans, prices, compared=True), width, short=short)


def of(made: Plan, **options: bool) -> str:
    return " ".join(" ".join(shown(view(made, 80, **options))).split())


def test_code_with_the_same_result_is_shown_where_it_pays() -> None:
    """Would notice: a diff for a setup that is no faster than what needs none, or than one that is nearer to the
    script's result; none where nothing else fits."""
    chunked = replace(PATCH, name="chunked loss", result="in chunks")
    own, paste, near = setup(8, 1, 42.0, 1.0), setup(4, 2, 19.0, 2.0), setup(8, 1, 15.0, 1.5, EIGHT_BITS)
    both = setup(8, 1, 9.0, 1.6, chunked, EIGHT_BITS)
    assert not plan(own, paste, setup(8, 1, 12.0, 1.95, chunked)).with_code, "within the noise"
    (results,) = plan(own, paste, near, setup(8, 1, 12.0, 1.7, chunked), both).with_code
    assert results.candidate.group == "same result", "with 8 bits it is slower than 8 bits alone"
    (alone,) = plan(own, both).with_code
    assert "with other code fits 8 × 1" in of(plan(own, both)) and alone is not None


def test_what_costs_much_stands_under_the_verdict() -> None:
    """Would notice: bf16 that a T4 emulates, as the last line of all, or only without --short."""
    own = setup(8, 1, 10.0, 1.0, gpu="T4")
    assert own.prediction is not None
    own = replace(own, prediction=own.prediction.with_warnings("T4 emulates bf16"))
    made = plan(own, gpu="T4")
    for short in (True, False):
        rows = shown(view(made, 200, short=short), 200)
        assert rows[0].startswith("FASTEST") and rows[1] == "T4 emulates bf16."
        assert "T4 emulates bf16." in shown(compared_view([made], {}, 200, short=short), 200)
    assert plans_json([made], {})[0]["warnings"] == ["T4 emulates bf16"]


def test_the_answer_then_what_to_paste_then_the_table() -> None:
    """Would notice: a faster setup with another result on the first line, a patch that is proposed, arguments that no
    shell takes back, a message of a library that is read as markup, rows in the order in which they were traced."""
    lines = shown(view(typical_plan(), 80))
    text = " ".join(" ".join(shown(view(typical_plan(), 120), 120)).split())
    assert lines[0].startswith("FASTEST THAT FITS RTX 3090: 8 × 1, checkpointing: up to 19.00 GiB")
    order = (
        "Your script as it is, 8 × 1, does not fit: needs up to 42.80 GiB, 21.01 GiB over the limit.",
        "Nearly the same, 27 % faster: 8 × 1, 8-bit AdamW: optimizer states in 8 bits",
        "Same result, with other code, 2.8 times as fast: 8 × 1, fused loss.",
        "a setup may use 21.79 GiB (92 %); 8 sequences an optimizer step; 6 setups compared, 5 of them traced",
        '--activation_checkpointing_kwargs \'{"use_reentrant":false,"every_n_layers":2}\'',
        "--optim adamw_bnb_8bit",
        'With other code: 8 × 1, fused loss Change the script: loss = fused("<b>") loss.backward() Add to your script',
        "Same result GiB",
        "→ 8 × 1, checkpointing",
        "36 % slower: backward takes 350 ms more",
        "Nearly the same GiB",
        "With other code GiB",
        "Tight, or does not fit; fastest first",
        "The same arguments in other forms As YAML:",
        "Not tried: Liger kernels: [bold]none[/bold] for this model.",
    )
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    flags = [line.strip() for line in lines if line.lstrip().startswith("--")]
    assert all(line.endswith("\\") for line in flags[:2]) and not flags[2].endswith("\\")
    assert text.count("→") == 1
    short = shown(view(typical_plan(), 80, short=True))
    assert short[0] == lines[0] and len(short) <= 24


def test_what_is_not_known_is_no_number() -> None:
    """Would notice: a time of 0, a rank by a time that leaves out an operation, a plan without times that says it
    is the fastest."""
    untimed = plan(setup(8, 1, 42, None), setup(4, 2, 19, None), setup(2, 4, 12, None))
    text = of(untimed)
    assert text.startswith("LEANEST THAT FITS RTX 3090: 2 × 4: up to 12.00 GiB.")
    assert "No setup has a known time" in text and "tokens/s" not in text and "0.0" not in text
    odd = plan(setup(8, 1, 19, 0.1, unknown=("aten.odd",)), setup(4, 2, 15, 1.0))
    text = of(odd)
    assert text.startswith("FASTEST THAT FITS RTX 3090: 4 × 2:") and "no time known for aten.odd" in text
    assert "100 ms" not in text and "81,920" not in text
    pictures = plan(setup(8, 1, 19, 0.5, tokens=None))
    assert "16 samples/s" in of(pictures), "8 sequences in half a second"


def test_nothing_fits_and_nothing_to_change() -> None:
    """Would notice: a plan without an answer that shows one, or arguments for a script that is the best already."""
    text = of(plan(setup(8, 1, 42, 1.0), setup(1, 8, 30, 2.0)))
    assert text.startswith(
        "NOTHING FITS ON RTX 3090: the smallest, 1 × 8, needs up to 30.00 GiB, 8.21 GiB over the limit."
    )
    assert "Add to" not in text and "shorter rows, or a larger GPU: A100 40G" in text
    huge = of(plan(setup(8, 1, 900, 1.0)))
    assert "fewer sequences an optimizer step, or a larger GPU: no GPU that memkit knows has enough memory." in huge
    text = of(plan(setup(8, 1, 12, 1.0), setup(4, 2, 10, 2.0)))
    assert "nothing to change" in text and "Add to" not in text
    text = of(plan(setup(8, 1, 42, 1.0), setup(8, 1, 12, 2.0, EIGHT_BITS)))
    assert text.startswith("FASTEST THAT FITS") and "Nothing fits with the same result. This is nearly" in text
    text = of(plan(setup(8, 1, 42, 1.0), setup(8, 1, 12, 2.0, SDPA)))
    assert "attn_implementation='sdpa'" in text, "what no flag says"


def test_what_is_tight_is_shown_and_not_proposed() -> None:
    """Would notice: a setup above 92 % of the GPU on the first line, or one called not fitting that completes."""
    tight = setup(4, 2, 22.2, 1.2)
    alone = plan(setup(8, 1, 42, 1.0), tight)
    assert tight.tight and not tight.fits and (alone.verdict, alone.proposed) == ("tight", None)
    text = of(alone)
    assert text.startswith("TIGHT ON RTX 3090: the smallest, 4 × 2, needs up to 22.20 GiB, 0.41 GiB over the limit;")
    both = plan(tight, setup(2, 4, 12, 2.0))
    assert both.proposed is not None and both.proposed.candidate.name == "2 × 4"
    assert "4 × 2, is tight: needs up to 22.20 GiB, 0.41 GiB over the limit." in of(both)
    assert "tight: 0.41 GiB over the limit" in of(both)


def test_choices_that_change_nothing_are_no_setups_of_their_own() -> None:
    """A front end may always turn checkpointing on: then "no checkpointing" is the same training.
    Would notice: a setup that is dropped although it takes less, or longer."""
    own, same = setup(8, 1, 12.0, 1.0), setup(8, 1, 12.0, 1.0, CHECKPOINTING)
    less, more = setup(8, 1, 11.0, 1.0, ALLOCATOR), setup(8, 1, 12.0, 1.2, ALLOCATOR)
    both = setup(8, 1, 11.0, 1.0, ALLOCATOR, CHECKPOINTING)
    assert plan(own, same, less, more, both).compared == (own, less, more)


def test_a_plan_for_a_front_end_has_its_keys() -> None:
    made = plan(setup(8, 1, 42.0, 1.0), setup(4, 2, 19.0, 2.0), front_end="axolotl")
    results = of(made)
    assert "Write into the config of axolotl: micro_batch_size: 4" in results and "--per_device" not in results


def test_a_stopped_search_never_says_that_nothing_fits() -> None:
    """Would notice: a larger GPU rented, or a CI that fails for good, because a search had no time."""
    own = setup(8, 1, 42, 1.0)
    for by_hand in (False, True):
        none = plan(own, stopped=True, stopped_by_hand=by_hand, also=("lomo",))
        assert none.verdict == "unfinished" and plan(own).verdict == "nothing fits"
        for text in (of(none), of(none, short=True)):
            assert "NOTHING" not in text.upper() and "larger GPU" not in text
            assert text.startswith("NO SETUP FOUND YET") and ("--limit" in text) is not by_hand
    near = setup(8, 1, 12, 2.0, EIGHT_BITS)
    text = of(plan(own, near, stopped=True))
    assert text.startswith("FASTEST SO FAR THAT FITS") and "Nothing fits" not in text and "found yet" in text
    (results,) = plans_json([plan(own, near, stopped=True)], {})
    assert (results["verdict"], results["stopped"]) == ("fits", True)


def test_a_caution_stands_below_the_verdict() -> None:
    """Would notice: T5 in fp16 on the first line, and no word of its losses but at the very end."""
    made = plan(setup(8, 1, 42, 1.0), setup(8, 1, 12, 2.0, training=changed(MADE, fp16_overflow="fp16: too large")))
    assert "fp16: too large." in list(wording.headline_details(made)) and "fp16: too large" in of(made, short=True)


def test_unfinished_searches_of_several_gpus_are_marked() -> None:
    """Would notice: a GPU that is called the cheapest beside one whose search was stopped, or that is said to be too
    small."""
    stopped = plan(setup(8, 1, 42.8, 1.0, gpu="T4"), gpu="T4", stopped=True)
    done = plan(setup(8, 1, 50, 0.3, gpu="H200"), gpu="H200")
    for price in ({}, {"H200": 4.0}):
        lines = shown(compared_view([stopped, done], price, 120), 120)
        assert " SO FAR: H200" in lines[0]
        (row,) = (at for at, line in enumerate(lines) if line.startswith("T4  "))
        assert "the smallest so far" in lines[row] and "search not finished" in " ".join(lines[row : row + 4])
    assert " SO FAR" not in shown(compared_view([done], {}, 80))[0]
    small = plan(setup(8, 1, 60, 1.0, gpu="L4"), gpu="L4")
    for which in ([stopped, small], [small, stopped]):
        assert shown(compared_view(which, {}, 80))[0].startswith("NO SETUP FOUND YET")
    assert shown(compared_view([small], {}, 80))[0].startswith("NOTHING FITS")


def test_what_fits_with_other_code_is_in_a_table_also_where_it_does_not_pay() -> None:
    """Would notice: a setup that the log says fits, and no table has."""
    chunked = replace(PATCH, name="chunked loss", result="in chunks")
    made = plan(setup(8, 1, 42.0, 1.0), setup(4, 2, 19.0, 1.0), setup(4, 2, 18.0, 1.4, chunked))
    assert not made.with_code and "4 × 2, chunked loss" in of(made)


def test_a_method_that_was_asked_for_is_answered_in_short_too() -> None:
    """Would notice: `--also qlora --short` that says nothing of QLoRA."""
    why = {"QLoRA": "the script trains adapters already"}
    made = plan(setup(8, 1, 12, 2.0), also=("QLoRA",), left_out=why)
    assert "QLoRA: the script trains adapters already." in of(made, short=True)


def test_several_gpus_are_started_by_torchrun() -> None:
    """Would notice: an answer for two GPUs that trains on one; a command for a script that does not exist."""
    start = "Start it with: torchrun --nproc_per_node 2 train.py ARGUMENTS"
    changed = setup(8, 1, 42, 1.0), setup(8, 1, 12, 2.0, CHECKPOINTING, ALLOCATOR)
    text = of(plan(*changed, gpus=2))
    assert start in text and "First type: export PYTORCH_ALLOC_CONF=expandable_segments:True Add to" in text
    assert start in of(plan(setup(8, 1, 12, 1.0), gpus=2), short=True), "also where nothing is to change"
    assert "Start it" not in of(plan(*changed)) and "Start it" not in of(plan(changed[0], gpus=2))
    both = [plan(*changed, gpus=2), plan(setup(8, 1, 12, 1.0, gpu="H200"), gpu="H200", gpus=2)]
    assert " ".join(" ".join(shown(compared_view(both, {}, 80))).split()).count(start) == 1
    text = of(plan(*changed, gpus=2, script=None))
    assert "torchrun --nproc_per_node 2 SCRIPT ARGUMENTS" in text and "Give your training script" in text
    made = plan(setup(8, 1, 12, 2.0, steps_on_cpu=True), gpus=2)
    assert made.launch.startswith("OMP_NUM_THREADS=$(($(nproc) / 2)) torchrun "), (
        "torchrun gives each process one thread"
    )
    assert "OMP" not in replace(made, gpus=1).launch


def test_a_name_of_two_gpus_is_said_to_be_the_faster() -> None:
    """Would notice: the owner of a PCIe version, who names it without "PCIe" and is promised the module's speed."""

    def text(name: str) -> list[str]:
        return list(_gpu_variant_notes(described_machine(name, None, None, None)))

    (line,) = text("A100 80GB")
    assert line.endswith('as a module (SXM); of the PCIe version: --gpu "A100 80GB PCIe"')
    assert text("A100 80GB PCIe") == text("RTX 4090") == text("80GB") == []


def test_another_batch_is_said_first() -> None:
    """Would notice: another batch than the script's that is not said, the script's own among the ranked, a time of
    another batch that is compared with it."""
    asked = plan(setup(7, 1, 12, 0.5), setup(8, 2, 15, 1.0), setup(4, 4, 12, 1.1), sequences=16)
    lines = shown(view(asked, 80))
    assert lines[0].startswith("FASTEST THAT FITS RTX 3090: 8 × 2:")
    assert lines[2].startswith("16 sequences an optimizer step instead of the script's 7")
    text = of(asked)
    assert "Your script as it is fits: 7 × 1: up to 12.00 GiB, 0.500 s a step" in text
    assert "16 sequences an optimizer step; 3 setups compared" in text and "times as slow" not in text
    (results,) = plans_json((asked,), {})
    assert (results["sequences_a_step"], results["own_sequences_a_step"], results["best"]) == (16, 7, "8 × 2")
    assert [each["name"] for each in results["setups"]] == ["8 × 2", "4 × 4", "7 × 1"]
    assert results["setups"][2]["why"] == "the script's own 7 sequences an optimizer step"
    assert asked.file()["about"]["own_sequences_a_step"] == 7 and "own_sequences" not in str(typical_plan().file())
    head = plan_text(asked, "plan.yaml").splitlines()
    assert head[2].startswith("# 16 sequences an optimizer step instead of the script's 7")


def test_a_batch_that_no_micro_batch_divides() -> None:
    """Would notice: seven passes of one sequence, and no word of what would give others."""
    text = of(plan(setup(7, 1, 42, 1.0), setup(1, 7, 12, 2.0)))
    assert "no micro-batch between 1 and 7 divides 7; --sequences-per-step 8 has some" in text
    for fine in (plan(setup(7, 1, 12, 1.0)), plan(setup(8, 1, 42, 1.0), setup(1, 8, 12, 2.0))):
        assert "no micro-batch" not in of(fine)


def test_what_fits_with_other_code_alone_is_no_answer() -> None:
    """Would notice: a setup that no argument gives proposed as one, or not shown where nothing else fits; the leanest
    of what does not fit named by what does."""
    made = plan(setup(8, 1, 42, 1.0), setup(1, 8, 30, 2.0), setup(8, 1, 12, 0.5, PATCH))
    text = of(made)
    assert text.startswith("NOTHING FITS ON RTX 3090 WITHOUT OTHER CODE: the smallest, 1 × 8, needs up to 30.00 GiB")
    assert "with other code fits 8 × 1, fused loss: up to 12.00 GiB, 0.500 s a step (0.450 to 0.650)" in text
    assert "With other code: 8 × 1, fused loss" in text and made.proposed is None
    with pytest.raises(LookupError):
        made.file()
    compared = shown(compared_view([made, plan(setup(8, 1, 50, 0.3, gpu="H200"), gpu="H200")], {}, 200), 200)
    assert any("with other code fits 8 × 1, fused loss" in line for line in compared)


def test_gpus_beside_one_another() -> None:
    """Would notice: a GPU on which nothing fits that falls out of the table, a cost without a price."""
    gpus = [
        typical_plan(),
        plan(setup(8, 1, 42.8, 1.0, gpu="T4"), gpu="T4"),
        plan(setup(8, 1, 50, 0.3, gpu="H200"), gpu="H200"),
    ]
    lines = shown(compared_view(gpus, {"RTX 3090": 0.2, "H200": 4.0}, 80))
    text = " ".join(" ".join(shown(compared_view(gpus, {}, 200), 200)).split())
    assert lines[0].startswith("CHEAPEST: RTX 3090: 8 × 1, checkpointing")
    names = [line.split("  ")[0] for line in lines if line.startswith(("RTX 3090  ", "T4  ", "H200  "))]
    assert names == ["RTX 3090", "H200", "T4"]
    assert text.count("the smallest, 8 × 1, needs up to 42.80 GiB, 29.40 GiB over the limit") == 2
    lines = shown(compared_view(gpus, {}, 80))
    assert lines[0].startswith("FASTEST: H200") and "cost" not in " ".join(lines)
