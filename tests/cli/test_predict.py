"""`memkit predict`, as a user types it; in this process, because starting Python each time takes most of the time."""

from __future__ import annotations

import http.server
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hf_memkit import predict_recipe
from hf_memkit.cli import predict_answer
from hf_memkit.cli.main import main
from hf_memkit.cli.predict import _resolved
from hf_memkit.cli.predict_next import NextSetup
from hf_memkit.cli.predict_options import PredictOptions
from hf_memkit.cli.predict_script import searched
from hf_memkit.common.terms import CATEGORIES, PHASES
from hf_memkit.common.units import GIB, MIB
from hf_memkit.prediction import predict
from hf_memkit.prediction import predict as judge
from hf_memkit.prediction.confidence import Confidence
from hf_memkit.prediction.prediction import Prediction, with_rest
from hf_memkit.recipes.schema import load_recipe
from hf_memkit.recipes.variant_search import predict_nothing
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from tests.conftest import ROOT, Memkit
from tests.plan.made_plans import CHECKPOINTING
from tests.plan.made_plans import setup as made_setup

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 2,
    "n_layer": 2,
    "vocab_size": 100,
    "n_positions": 64,
}
XL = ("--model", "gpt2-xl", "--gpu-memory", "16GB")

Run = Callable[..., tuple[int, str, str]]


def prepared(model: str | None = None, preset: str | None = None, **options: Any) -> Setup:
    """As the command line prepares it."""
    _, request = PredictOptions(model=model, preset=preset, **options).request()
    return _resolved(request, None, None)[0]


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loaded_worker: None
) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def of(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["predict", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return of


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2))
    return str(folder)


BERT: dict[str, Any] = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "num_attention_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 48,
}  # fmt: skip
LLAMA = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 100}


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({"model_type": "memkit-odd", "auto_map": {"AutoConfig": "odd.OddConfig"}}, (), "--trust-remote-code"),
        ({**GPT2, "n_head": 3}, (), "divisible by num_heads"),
        ({**GPT2, "n_embd": -32}, (), "negative dimension -32"),
        ({"model_type": "nope"}, (), "model type `nope`"),
        ({"model_type": "t5"}, (), "names no class"),
        (None, (), "not a valid JSON"),
        ({**BERT, "pad_token_id": 200}, (), "Padding_idx must be within num_embeddings"),
        ({**BERT, "architectures": ["NoSuchModel"]}, (), "no model class 'NoSuchModel'"),
        ({**BERT, "architectures": ["BertModel"]}, (), "BertForSequenceClassification"),
        # Three heads for keys cannot be shared by two: the model can be built, and no step can be made.
        ({"model_type": "llama", **LLAMA, "num_key_value_heads": 3}, (), "this training cannot be traced"),
        (BERT, ("--args", "mine.json"), "deepspeed: what it splits"),
        (GPT2, ("--set", "fsdp=full_shard"), "give several: --gpus 2"),
        (GPT2, ("--batch-size", "1000000000000"), "give a smaller batch"),
        (GPT2, ("--gpus", "1000000000"), "give 100000 or fewer"),
    ],
)
def test_what_cannot_be_predicted_gets_one_line_and_writes_nothing(
    run: Run, tmp_path: Path, config: dict[str, Any] | None, arguments: tuple[str, ...], words: str
) -> None:
    files = {
        "config.json": "{" if config is None else json.dumps(config), "odd.py": "raise SystemExit('it ran')",
        "ds.json": '{"zero_optimization": {"stage": 2}}', "mine.json": '{"output_dir": "out", "deepspeed": "ds.json"}',
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    code, out, err = run("--model", "./", "--gpu", "T4", "--sequence-length", "8", *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1, (out, err)
    assert err.startswith("memkit: error: ") and words in err, err
    assert {path.name for path in tmp_path.iterdir()} == set(files)


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for a model whose terms nobody has accepted."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to model somebody/gated is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.slow
def test_a_gated_model_says_what_to_do(memkit: Memkit, hub: str, tmp_path: Path) -> None:
    """Over the real client; what stands in is the hub."""
    environment = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    ran = memkit("predict", "--model", "somebody/gated", "--gpu", "T4", env=environment)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1, ran.stderr
    assert "is gated" in ran.stderr and "hf auth login" in ran.stderr


def test_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from hf_memkit.cli import main; main(['predict', '--help']);"
        "sys.exit(str(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules))) )"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stderr.strip() == "[]" and "per_device_train_batch_size" in ran.stdout.replace("\n", "")


def test_without_a_preset_it_is_trainer_s_own_with_what_was_given(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"model_name_or_path: {tiny}\nblock_size: 32\noptim: adafactor\nmy_own: 3\n7: 8\n"
        "dtype: bfloat16\nuse_peft: false\ndataset_name: wikitext\nlora_r: 4\nwarmup_ratio: 0.1\n"
    )
    job = prepared(args=str(tmp_path / "mine.yaml"), gpu="T4", batch_size=2, accumulation=3, settings=["bf16=0"])
    assert job.preset == "trainer-defaults" and (job.micro_batch_size, job.sequence_length) == (2, 32)
    assert job.arguments == {
        "optim": "adafactor", "bf16": False, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
    }  # fmt: skip
    assert job.accumulation == 3 and job.resolved_for.model is not None and job.resolved_for.machine.gpu is not None
    assert any("your block_size" in note for note in job.notes)
    former, *others = [line.partition(": ")[2] for line in job.warnings]
    assert former.startswith("warmup_ratio") and "warmup_steps: 0.1" in former
    assert others == [
        "my_own, 7: no field of TrainingArguments or TRL; left out of the prediction",
        "dtype: read by your script, not by Trainer; left out of the prediction (--preset and --technique are in it)",
    ]
    shown = drawn(predicted(job, 12), job, 100)
    first = "\n".join(shown[:12])
    assert "Warning: " in first and "warmup_ratio" in first and "my_own" in first and "use_peft" not in "".join(shown)
    alone = prepared(tiny)
    assert alone.micro_batch_size == 8 and alone.sequence_length == 64, "Trainer's default; the model's positions"
    assert any("Trainer's default" in note for note in alone.notes)
    assert any("assumed" in note for note in alone.notes)


@pytest.mark.slow
def test_evaluations_that_generate_are_seq2seqtrainer_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 32,
        "num_layers": 1, "num_heads": 2, "vocab_size": 100, "decoder_start_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    def evaluate_gib(length: int) -> float:
        own = {"predict_with_generate": True, "generation_max_length": length, "eval_strategy": "epoch"}
        (tmp_path / "mine.json").write_text(json.dumps({**own, "output_dir": "out"}))
        options = ["--model", str(tmp_path), "--args", str(tmp_path / "mine.json"), "--sequence-length", "16"]
        assert main(["predict", *options, "--gpu", "T4", "--json"]) == 0
        results = json.loads(capsys.readouterr().out)
        assert any("evaluations generate" in note for note in results["notes"])
        return float(results["phases"]["evaluate"]["peak_allocated_gib"])

    assert evaluate_gib(20_000) > 2 * evaluate_gib(20)


def test_with_a_preset_the_batch_is_of_one_gpu(tiny: str) -> None:
    job = prepared(tiny, "8bit", gpu_memory="16GB", batch_size=3, accumulation=2, gpus=2, sequence_length=16)
    arguments = job.arguments
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (3, 2)
    assert (job.micro_batch_size, job.accumulation, job.sequence_length, job.resolved_for.gpus) == (3, 2, 16, 2)
    assert job["model.name"] == tiny and "optim" in arguments
    for card, times in (("T4", 1), ("RTX 4090", 0)):
        lacks = prepared(tiny, "resident", gpu=card, batch_size=1)
        assert sum("computes in bf16" in note for note in (*lacks.notes, *lacks.problems)) == times


def test_a_preset_keeps_the_class_of_a_model_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    job = prepared(str(tmp_path), "checkpointed", gpu="T4", batch_size=1)
    assert job["model.class"] == "BertForMaskedLM" and job.sequence_length == 48


def test_techniques_go_on_top_of_trainer_s_defaults(tiny: str) -> None:
    job = prepared(tiny, technique=["fused-gelu", "lora"], settings=["rank=4"], gpu="T4")
    assert job.techniques == ("lora", "fused-gelu") and job["adapter.r"] == 4
    alone = prepared(tiny, technique=["adafactor"], gpu="T4")
    assert alone.techniques == ("adafactor",) and alone["arguments.optim"] == "adafactor"


def test_known_mistakes_of_the_user_s_are_told(tiny: str) -> None:
    """Trainer would train all the same, so that they are no errors here."""
    job = prepared(tiny, gpu="T4", settings=["torch_compile=false", "torch_compile_mode=default"])
    assert any(note.startswith("known mistake: torch_compile") for note in job.notes), job.notes


@pytest.fixture(scope="module")
def xl() -> Setup:
    return prepared("gpt2-xl", gpu_memory="16GB", batch_size=8, sequence_length=1024, ram="64GB")


def predicted(job: Setup, reserved_gib: float, cap_gib: float = 11.0, **changes: Any) -> Prediction:
    """A prediction as a trace could give it."""
    peak = 10 * GIB
    held = {"weights": 3 * GIB, "optimizer": 4 * GIB, "activations": 2 * GIB, "buffers": 16 * MIB, "loss": 0}
    values: dict[str, Any] = {
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": (int(cap_gib * GIB), int(reserved_gib * GIB)),
        "outside_allocator_bytes": 500 * MIB,
        "smallest_cap_bytes": int(cap_gib * GIB),
        "phases": {"forward": (7 * GIB, 8 * GIB), "optimizer": (peak, None)},
        "categories": with_rest({**held}, peak),
        "peak_phase": "optimizer",
        "peak_operation": "aten._foreach_sqrt.default",
        "peak_module": "model[0].layers",
        "confidence": Confidence("trace", "two steps"),
        "source": "torch",
        "host_rss_bytes": 6 * GIB,
        "notes": ("flash attention's scratch is bounded",),
    }
    return Prediction(**{**values, **changes}).with_verdict(job.resolved_for.machine)


def drawn(
    prediction: Prediction, job: Setup, width: int, instead: NextSetup | None = None, *, short: bool = False
) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    predict_answer.present(
        prediction, predict_answer.title_of(job), [], lambda: predict_answer.advice_for(prediction, job, instead),
        warnings=job.warnings, short=short, console=console,
    )  # fmt: skip
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [60, 90])
def test_the_table_is_one_screen_as_wide_as_the_terminal(xl: Setup, width: int) -> None:
    lines = drawn(predicted(xl, 12), xl, width)
    assert max(map(len, lines)) <= width and len(lines) <= 45
    assert lines[0].startswith("FITS: needs up to 12.5 GiB; 16GB GPU has 15.6 GiB")
    text = " ".join(" ".join(lines).split())
    assert "gpt2-xl, 1,557,611,200 parameters; trainer-defaults; 16GB GPU" in text
    assert "8 × 1024 tokens per GPU" in text and "model[0].layers" in text and "aten._foreach_sqrt.default" in text
    bars = {name: next(line for line in lines if line.startswith(name)) for name in CATEGORIES}
    lengths = {name: line.count("█") for name, line in bars.items()}
    assert lengths["optimizer"] == max(lengths.values()) and len(bars["optimizer"]) == width
    assert lengths["activations"] == pytest.approx(lengths["optimizer"] / 2, abs=1)
    assert bars["buffers"].endswith(("▏", "█")) and "16.0 MiB" in bars["buffers"], "what is small is shown too"
    assert bars["loss"].split() == ["loss", "0"]
    assert "forward 7.00 GiB 8.00 GiB" in text and "optimizer 10.00 GiB not modelled" in text
    assert "11.00 GiB to 12.00 GiB" in text and "page-locked RAM not modelled" in text
    assert "not yet checked on a GPU" in text
    assert "Note: flash attention's scratch is bounded." in text and "Try next" not in text


def test_a_library_s_message_neither_fills_the_screen_nor_steers_it(xl: Setup) -> None:
    prediction = predicted(xl, 12).with_notes("not traced: \x1b[2J" + "backend " * 500)
    lines = drawn(prediction, xl, 80)
    assert len(lines) <= 40 and "\x1b" not in "".join(lines) and "\\x1b[2J" in "".join(lines)
    assert "backend " * 500 in prediction.to_json()["notes"][-1]


def nearest(gib: float = 8.6, words: str = "") -> NextSetup:
    """Another micro-batch, checkpointed, that was traced."""
    return NextSetup(made_setup(2, 4, gib, None, replace(CHECKPOINTING, result=words)))


def test_a_job_that_does_not_fit_gets_what_fills_it_and_what_to_try(xl: Setup) -> None:
    text = " ".join(" ".join(drawn(predicted(xl, 20, 19), xl, 100, nearest())).split())
    assert text.startswith("DOES NOT FIT: needs at least 19.5 GiB; 16GB GPU has 15.6 GiB.")
    order = (
        "gpt2-xl, 1,557",
        "What to do",
        "Largest part of the peak: optimizer, 4.00 GiB",
        "Try next: micro-batch 2 × accumulation 4, checkpointing: 8.60 GiB, fits.",
    )
    places = [text.index(each) for each in order]
    assert places == sorted(places) and places[-1] < text.index("Peak allocated")
    smaller = " ".join(" ".join(drawn(predicted(xl, 20, 16), xl, 100)).split())
    assert "Try next" not in smaller and "Give a smaller --batch-size or --sequence-length, or more RAM" in smaller
    tight = " ".join(drawn(predicted(xl, 15), xl, 100))
    assert tight.startswith("TIGHT: ") and "To leave room, give a smaller --batch-size" in tight
    assert "Largest part of the peak" not in " ".join(drawn(predicted(xl, 12, host_rss_bytes=100 * GIB), xl, 100)), (
        "it is RAM"
    )


def test_short_is_one_screen_whatever_there_is_to_say(xl: Setup) -> None:
    instead = nearest(words="GPU memory and RAM are small, a disk is fast " * 9)
    job = replace(xl, warnings=("mine.yaml: " + "lr, \x1b[2J" * 99, "mine.yaml: " + "lr, " * 99))
    words = {"peak_module": "model.layers" * 40, "confidence": Confidence("cpu trace", "two steps " * 40)}
    phases = dict.fromkeys(PHASES, (GIB, GIB))
    lines = drawn(
        predicted(xl, 20, 19, host_rss_bytes=900 * GIB, phases=phases, **words), job, 80, instead, short=True
    )
    text = "\n".join(lines)
    assert len(lines) <= 24 and max(map(len, lines)) <= 80 and "\x1b" not in text
    places = [text.index(each) for each in ("DOES NOT FIT: ", "Warning: ", "Try next: ", "Peak")]
    assert places == sorted(places) and lines[-1].endswith("--json prints every number.")
    for what in ("Made of: optimizer 4.00 GiB, weights 3.00 GiB", "By phase: load 1.00 GiB"):
        assert what in text


def test_the_verdict_stands_before_the_search_begins(xl: Setup) -> None:
    """Would notice: a verdict that is known after ten seconds and held back for a minute; one that Ctrl-C takes."""
    out = io.StringIO()
    seen = []

    def find() -> NextSetup:
        seen.append(out.getvalue())
        raise KeyboardInterrupt

    def search() -> list[str]:
        return [f"found: {searched(find)}"]

    console = Console(file=out, width=80)
    predict_answer.present(predicted(xl, 20, 16), "a title", ["known"], search, console=console)
    assert seen[0].startswith("DOES NOT FIT: ") and "known" in seen[0] and "Peak" not in seen[0]
    assert out.getvalue().startswith(seen[0]) and "found: None" in out.getvalue() and "Peak" in out.getvalue()


@pytest.mark.parametrize(
    ("cap", "what", "micro_batch", "wanted", "vain"),
    [
        (16, "script", 8, ["per_device_train_batch_size", "rows"], ["LoRA"]),
        (16, "script", 1, ["rows"], ["LoRA", "batch_size"]),
        (19, "script", 8, ["adamw_bnb_8bit", "LoRA"], ["batch_size", "rows"]),
        (16, "preset", 1, ["--sequence-length"], ["--batch-size"]),
        (16, "variant of images", 1, ["larger GPU"], ["batch_size"]),
    ],
)
def test_advice_is_about_what_frees_enough(
    xl: Setup, cap: float, what: str, micro_batch: int, wanted: list[str], vain: list[str]
) -> None:
    """Would notice: a smaller batch where it is 1 already, or where the optimizer's states alone do not fit."""
    words = " ".join(predict_answer.advice(predicted(xl, 20, cap), None, what, micro_batch))
    assert all(each in words for each in wanted) and not any(each in words for each in vain), words


@pytest.mark.exhaustive
def test_what_does_not_fit_is_answered_with_what_does(run: Run, tiny: str) -> None:
    """Would notice: a setup that was not traced, that has another batch, or does not fit itself."""
    shape = ("--model", tiny, "--gpu", "T4", "--gpu-memory", "1GB", "--sequence-length", "64", "--batch-size", "2048")
    code, out, _ = run(*shape, "--json")
    message = json.loads(out)
    assert code == 1 and message["try_next"]["basis"] == "trace"
    arguments = message["try_next"]["overrides"]["arguments"]
    size, accumulation = arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]
    assert (
        size * accumulation == 2048
        and size < 2048
        and message["try_next"]["peak_gib"] < 0.92 * message["capacity_gib"]
    )
    again = (*shape[:-1], str(size), "--accumulation", str(accumulation), "--json")
    more = [
        f"--set={name}={json.dumps(each)}" for name, each in arguments.items() if not name.endswith(("size", "steps"))
    ]
    results = json.loads(run(*again, *more)[1])
    high = results["peak_reserved_gib"][1] + results["outside_allocator_gib"]
    assert high == pytest.approx(message["try_next"]["peak_gib"], rel=0.02)


def test_what_is_missing_is_named(xl: Setup) -> None:
    """Would notice: missing RAM answered with a smaller batch, and a GPU that torch may not fill called free."""
    of_ram = " ".join(" ".join(drawn(predicted(xl, 11.5, host_rss_bytes=900 * GIB), xl, 100)).split())
    assert "The GPU has room. Use a machine with more RAM" in of_ram and "--batch-size" not in of_ram
    of_gpu = " ".join(" ".join(drawn(predicted(xl, 11.5, memory_fraction=0.5), xl, 100)).split())
    assert of_gpu.startswith("DOES NOT FIT: ") and "per_process_memory_fraction 0.5" in of_gpu
    assert "has room" not in of_gpu


def test_numbers_that_are_the_same_are_said_once_and_no_gpu_is_no_verdict(xl: Setup) -> None:
    job = replace(xl, job=replace(xl.resolved_for, machine=xl.resolved_for.machine.with_gpu(None)))
    text = " ".join(" ".join(drawn(predicted(job, 11, 11), job, 100)).split())
    assert "NO VERDICT: no GPU to judge by" in text and "no GPU;" in text
    assert "reserved 11.00 GiB; with" in text


def test_a_traced_prediction_from_end_to_end(run: Run, tiny: str) -> None:
    arguments = ("--model", tiny, "--gpu", "T4", "--sequence-length", "32", "--json")
    code, out, err = run(*arguments, "--batch-size", "2", "--accumulation", "2")
    assert code == 0 and err == ""
    message = json.loads(out)
    assert message["verdict"] == "fits" and message["confidence"]["level"] in ("trace", "cpu trace")
    assert {"forward", "backward", "optimizer"} <= set(message["phases"]) and message["peak_phase"] in message[
        "phases"
    ]
    assert sum(message["categories"].values()) == pytest.approx(message["peak_allocated_gib"])
    request = message["request"]
    assert (request["micro_batch_size"], request["sequence_length"], request["accumulation"]) == (2, 32, 2)
    assert request["gpu"]["name"] == "T4" and request["preset"] == "trainer-defaults" and message["try_next"] is None
    # Each of the tiny model's fp32 weights is on the GPU.
    assert message["categories"]["weights_gib"] * GIB >= 4 * request["parameters"]
    more = json.loads(run(*arguments, "--batch-size", "16")[1])
    assert more["peak_allocated_gib"] > message["peak_allocated_gib"]
    code, out, _ = run(*arguments[:-1])
    text = " ".join(out.split())
    assert code == 0 and "FITS: " in text and "two optimizer steps of transformers.Trainer" in text


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="shows a machine without a GPU")
def test_without_a_gpu_there_are_numbers_and_no_verdict(run: Run, tiny: str) -> None:
    code, out, _ = run("--model", tiny, "--json")
    message = json.loads(out)
    assert (
        code == 0
        and message["verdict"] is None
        and message["capacity_gib"] is None
        and message["peak_allocated_gib"] > 0
    )
    assert any("no verdict" in note for note in message["notes"])


def test_a_batch_of_more_than_a_thousand(tiny: str) -> None:
    """Beyond the rows that a small data set would have, more rows still take more memory."""
    one, two = (predict(prepared(tiny, gpu="T4", batch_size=size, sequence_length=4)) for size in (1024, 2048))
    logits = 1024 * 4 * GPT2["vocab_size"] * 4
    assert two.phases["forward"][0] - one.phases["forward"][0] >= logits


@pytest.mark.slow
def test_a_recipe_is_predicted_like_a_model(tiny: str, run: Run) -> None:
    options = ("--model", tiny, "--variant", "lora", "--gpu", "16GB", "--sequence-length", "64", "--json")
    _, out, _ = run("--recipe", "gpt2-on-16gb", *options)
    by_cli = json.loads(out)
    asked = by_cli["request"]
    assert (asked["recipe"], asked["preset"], asked["sequence_length"]) == ("gpt2-on-16gb", "lora", 64)
    by_name = predict_recipe("gpt2-on-16gb", variant="lora", model=tiny, sequence_length=64, gpu="16GB")
    assert by_cli["peak_allocated_gib"] == pytest.approx(by_name.peak_allocated_bytes / GIB) and by_name.phases
    assert any(note.startswith("variant lora") for note in by_name.notes)


def test_a_recipe_that_was_changed_is_chosen_by_prediction_too(tiny: str) -> None:
    asked = Request(model=tiny, gpu="16GB", sequence_length=64, arguments={"weight_decay": 0.1})
    recipe = load_recipe("gpt2-on-16gb")
    setup, prediction = _resolved(asked, recipe, judge)
    assert setup.preset == "resident" and "(predicted: " in setup.why
    assert prediction is not None and prediction.confidence.level == "trace"


def test_the_gpus_that_were_asked_for_win_over_the_recipe_s() -> None:
    recipe = load_recipe("llama-70b-lora-on-8x80gb")
    asked = [Request(variant="sharded", gpu_memory="80GB", gpus=gpus) for gpus in (None, 1, 4)]
    assert [_resolved(each, recipe, predict_nothing)[0].resolved_for.gpus for each in asked] == [8, 1, 4]
