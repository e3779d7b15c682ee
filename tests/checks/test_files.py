"""Files: what each is taken for, what is followed, and one line for what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_memkit.catalog.hardware import gpu_of_size
from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.checks import Subject, check, check_file
from hf_memkit.checks.reading import key_lines, read
from hf_memkit.cli import main
from hf_memkit.common.errors import InputError
from hf_memkit.deepspeed.presets import load
from tests.checks.case import MACHINE, OLD_GPU
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def gpt2_xl() -> ModelFacts:
    return describe("gpt2-xl", use_hub=False, use_built_in=True)


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(load("zero2")))
    return path


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ds.json", '{"bf16": 1 "fp16": 2}', "ds.json: line 1, column 12: Expecting ',' delimiter"),
        ("ds.json", '{"bf16": 1} x', "ds.json: line 1, column 13: Extra data"),
        ("ds.json", '{"bf16": 1,}', "a comma before }. Remove it"),
        ("ds.json", '{"bf16": }', "ds.json: line 1, column 10: no valid value"),
        ("ds.json", "[1, 2]", "ds.json: is a list, not keys and values"),
        ("args.yaml", "", "args.yaml: is empty"),
        ("ds.json", "\n", "ds.json: is empty"),
        ("args.yaml", "a: 1\nb: [1, 2\nc: 3\n", "args.yaml: line 3, column 2"),
        ("acc.yaml", "compute_environment: AMAZON_SAGEMAKER\n", "a config of `accelerate launch` for SageMaker"),
        ("ds.json", '{"bf16": 1, // half\n "fp16": 2}', "JSON has no comments"),
        ("ds.json", '{"a": "http://x", "b": 1 "c": 2}', "Expecting ',' delimiter"),
        ("train.sh", "torchrun train.py --deepspeed ds.json\n", "memkit check ds.json"),
        ("launch.txt", "accelerate launch train.py --bf16 true\n", "a shell script"),
        ("args.json", '{"foo": 1}', "no key is one of"),
        ("args.yaml", "training:\n  learning_rate: 1.0e-4\n", "of 'training' as a separate file"),
    ],
)
def test_a_broken_file_is_one_line_with_its_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as error:
        check_file(tmp_path / name)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ({"zero_optimization": {"stage": 2}}, "deepspeed"),
        ({"bf16": {"enabled": True}}, "deepspeed"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, "deepspeed"),
        ({"zero_optimization": {"stage": 2}, "bf16": True, "fp16": False}, "deepspeed"),
        ({"zero_optimization": {"stage": 2}, "grad_clip": 1, "my_own": 2, "train_mirco_batch": 4}, "deepspeed"),
        ({"zero_optimisation": {"stage": 2}}, "deepspeed"),
        ({"optimiser": {"type": "AdamW", "params": {"lr": 1e-4}}, "steps_per_print": 10}, "deepspeed"),
        ({"output_dir": "x", "bf16": True}, "arguments"),
        ({"variants": {}, "summary": "x"}, "recipe"),
        ({"num_processes": 8, "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}}, "accelerate"),
        ({"fsdp_transformer_layer_cls_to_wrap": "GPT2Block", "fsdp_state_dict_type": "FULL_STATE_DICT"}, "fsdp"),
        ({"transformer_layers_cls_to_wrap": ["GPT2Block"], "cpu_ofload": True, "version": 2}, "fsdp"),
        *((content, "other") for content in (
            {"base_model": "x", "datasets": [{"path": "y"}], "bf16": "auto", "learning_rate": "2e-5"},
            {"stage": "sft", "finetuning_type": "lora", "output_dir": "x", "warmup_ratio": 0.1},
            {"model": {"_component_": "torchtune.models.llama3"}, "optimizer": {"_component_": "torch.optim.AdamW"}},
            {"model": {"name": "mpt"}, "train_loader": {}, "optimizer": {"name": "adamw"}, "max_duration": "1ep"},
            {"trainer": {"devices": 8}, "exp_manager": {}, "model": {"optim": {"name": "adam"}}},
            {"model": "unsloth/x", "training": {"learning_rate": 2e-4}, "lora": {"lora_r": 16}},
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257},
            {"added_tokens_decoder": {}, "tokenizer_class": "GPT2Tokenizer"},
            {"bos_token_id": 1, "eos_token_id": 2, "transformers_version": "5.0.0"},
            {"peft_type": "LORA", "r": 8, "lora_alpha": 16},
        )),
        # Arguments that have a name in common with one of these.
        *((content, "arguments") for content in (
            {"output_dir": "x", "fsdp": True, "fsdp_config": {"version": 2}, "use_cpu": False},
            {"output_dir": "x", "model_type": "gpt2", "tokenizer_name": "y", "vocab_size": 100},
            {"output_dir": "x", "temperature": 1.0, "top_p": 0.9, "num_generations": 8},
            {"use_cpu": True, "debug": ""},
            {"model": {"name": "x"}, "data": {}, "training": {"num_train_epochs": 1}, "lora": {"r": 8}},
            {"model": {}, "data": {}, "optimizer": {"type": "AdamW", "lr": 1e-3}, "scheduler": {"type": "cosine"}},
            {"activation_checkpointing": True},
            {"output_dir": "x", "learning_rate": 2e-5, "bf16": True, "train_batch_size": 64},
            {"train_batch_size": 64, "bf16": True},
            {"wandb": {"project": "x"}, "seed": 1},
            {"model_name_or_path": "x", "per_device_train_batch_size": 4, "train_micro_batch_size_per_gpu": 4},
        )),
    ],
)  # fmt: skip
def test_a_file_is_known_by_its_keys(tmp_path: Path, content: dict[str, Any], kind: str) -> None:
    (tmp_path / "file.json").write_text(json.dumps(content))
    assert read(tmp_path / "file.json").kind == kind


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "deepspeed train_mem.py \\\n  --deepspeed ./scripts/zero2.json \\\n  --data_path ./playground/mix.json\n",
            ["./scripts/zero2.json"],
        ),
        ("llamafactory-cli train examples/lora_sft.yaml\nllamafactory-cli export examples/merge.yaml\n", []),
        (
            "accelerate launch --config_file=acc.yaml run_dpo.py recipes/dpo.yaml --data d.json\n",
            ["acc.yaml", "recipes/dpo.yaml"],
        ),
        ('python run_clm.py "args.json"\ntrl sft --config sft.yaml\n', ["args.json", "sft.yaml"]),
        ("torchrun train.py --deepspeed $HOME/ds.json --train_file data/train.json\n", []),
    ],
)
def test_of_a_shell_script_only_the_configs_are_named(tmp_path: Path, text: str, named: list[str]) -> None:
    path = tmp_path / "train.sh"
    path.write_text(text)
    other = read(path).other
    assert other is not None and other.advice.partition("memkit check ")[2].split() == named


def test_a_key_with_an_empty_value_is_not_missing(tmp_path: Path) -> None:
    arguments, config = tmp_path / "args.yaml", tmp_path / "ds.json"
    arguments.write_text("use_peft: true\ntorch_dtype:\nevaluation_strategy:\n")
    config.write_text('{"zero_optimization": {"stage": null}}')
    shown = {p.key: (p.value, p.missing) for p in (*check_file(arguments), *check_file(config))}
    assert shown["torch_dtype"] == shown["evaluation_strategy"] == shown["zero_optimization.stage"] == (None, False)
    assert shown["train_micro_batch_size_per_gpu"] == (None, True)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('{"bf16": {"enabled": false}, "fp16": {"enabled": false, "enabled": true}}', ["fp16.enabled"]),
        ('{"fp16": {"enabled": false}, "bf16": {"enabled": false}, "fp16": {"enabled": false}}', ["fp16"]),
        ('{"bf16": {"enabled": 1, "enabled": 1}, "aio": {"a": {"enabled": 1, "enabled": 1}}}',
         ["bf16.enabled", "aio.a.enabled"]),
        ('{"bf16": {"enabled": true}}', []),
    ],
)  # fmt: skip
def test_the_duplicate_s_own_place_is_named(tmp_path: Path, text: str, keys: list[str]) -> None:
    (tmp_path / "ds.json").write_text(text)
    assert list(read(tmp_path / "ds.json").duplicates) == keys


def test_duplicates_of_an_argument_file_are_found(tmp_path: Path, preset: Path) -> None:
    arguments = tmp_path / "args.yaml"
    arguments.write_text(f"bf16: true\nmax_steps: 3\nbf16: false\ndeepspeed: {preset.name}\n")
    shown = [(p.rule, p.file, p.key, p.value) for p in check_file(arguments)]
    assert shown == [("duplicate-key", str(arguments), "bf16", False)]
    beside = [(p.rule, p.file, p.key) for p in check_file(preset, arguments)]
    assert beside == [("duplicate-key", str(arguments), "bf16")]
    arguments.write_text("deepspeed:\n  bf16: {enabled: auto, enabled: auto}\n")
    assert "deepspeed.bf16.enabled" in {p.key for p in check_file(arguments) if p.rule == "duplicate-key"}
    arguments.write_text('deepspeed: \'{"fp16": {"enabled": "auto", "enabled": "auto"}}\'\n')
    assert "fp16.enabled" in {p.key for p in check_file(arguments) if p.rule == "duplicate-key"}


def test_an_argument_file_s_config_is_followed(tmp_path: Path, preset: Path) -> None:
    arguments = tmp_path / "args.yaml"
    arguments.write_text(f"output_dir: out\ndeepspeed: {preset.name}\nlearning_rate: 1e-4\n")
    assert [(p.rule, p.file, p.key) for p in check_file(arguments)] == [
        ("text-for-number", str(arguments), "learning_rate")
    ]
    config = load("zero2") | {"gradient_clipping": 0.5}
    preset.write_text(json.dumps(config))
    shown = [problem for problem in check_file(arguments) if problem.rule == "trainer-mismatch"]
    assert [(p.key, p.value, Path(p.file).name) for p in shown] == [("gradient_clipping", 0.5, "ds.json")]
    assert "max_grad_norm=1.0 (its default)" in shown[0].why and "ds.json" in shown[0].why


def test_a_field_that_is_also_a_section_of_deepspeed_makes_no_deepspeed_config(tmp_path: Path) -> None:
    """transformers 5.23 has a field `activation_checkpointing`, DeepSpeed a section of that name."""
    arguments = tmp_path / "args.yaml"
    arguments.write_text("output_dir: out\nactivation_checkpointing: true\nbf16: true\n")
    assert read(arguments).kind == "arguments" and check_file(arguments) == []
    arguments.write_text("activation_checkpointing: {partition_activations: true}\n")
    assert read(arguments).kind == "deepspeed"


def test_without_transformers_the_answer_says_what_was_not_checked(
    tmp_path: Path, preset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "args.yaml").write_text("output_dir: out\nlearning_rate: 0.1\n")
    absent = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr("hf_memkit.cli.check.importlib", absent)
    lines = []
    for file in ("args.yaml", "ds.json"):
        main(["check", str(tmp_path / file)])
        lines.append("are not checked: transformers" in capsys.readouterr().err)
    assert lines == [True, False]


def test_the_command_line(tmp_path: Path, preset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(preset)]) == 0
    assert capsys.readouterr().out == f"No known mistakes in {preset}.\n"
    preset.write_text(json.dumps(load("zero2") | {"gradient_cliping": 1.0}))
    assert main(["check", str(preset), "--json", "--fail-on", "warning"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)
    assert list(problem) == ["rule", "severity", "file", "key", "value", "why", "fix"]
    assert problem["key"] == "gradient_cliping" and "gradient_clipping" in problem["fix"]
    assert main(["check", str(preset), "--model", "gpt2-xl", "--gpu", "T4"]) == 1
    assert "card-too-small" in capsys.readouterr().out
    preset.write_text("{")
    assert main(["check", str(preset)]) == 2
    assert capsys.readouterr().err.startswith(f"memkit: error: {preset}: line 1, column 2: ")


def _one_of_each(tmp_path: Path) -> Path:
    """A DeepSpeed config with an error, a warning and a hint, each on a separate line, indented with tabs."""
    zero = {"stage": 2, "sub_group_size": 100, "reduce_bucket_size": "2e8"}
    path = tmp_path / "ds config.json"
    text = {"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": zero}
    path.write_text(json.dumps(text, indent="\t"))
    return path


def test_the_whole_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would notice a screen that loses a line of a problem, or its order; and a long value that fills the screen."""
    path = _one_of_each(tmp_path)
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "gradient_cliping": 1.0}))
    assert main(["check", str(path)]) == 1
    screen = Path(__file__).with_name("check_screen.txt")
    assert capsys.readouterr().out.replace(str(path), "ds.json") == screen.read_text()
    path.write_text(json.dumps({**config, "gradient_cliping": "1.0 " * 500}))
    main(["check", str(path)])
    (long,) = (line for line in capsys.readouterr().out.splitlines() if "gradient_cliping = " in line)
    assert len(long.partition(" = ")[2]) < 80 and long.endswith("…")


@pytest.mark.parametrize(
    ("severity", "codes"), [("error", [1, 1, 1]), ("warning", [0, 1, 1]), ("hint", [0, 0, 1]), (None, [0, 0, 0])]
)
def test_the_exit_code_is_what_fail_on_says(tmp_path: Path, severity: str | None, codes: list[int]) -> None:
    config = load("zero2")
    zero = config["zero_optimization"]
    if severity == "error":
        zero["stage"] = 5
    elif severity == "warning":
        zero["sub_group_size"] = 100
    elif severity == "hint":
        del zero["reduce_bucket_size"]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert [main(["check", str(path), "--fail-on", level]) for level in ("error", "warning", "hint")] == codes
    assert main(["ds", "check", str(path), "--fail-on", "errors"]) == 2


def test_sarif_has_every_problem_with_its_rule_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked against the schema of OASIS by hand; here what code scanning reads."""
    path = _one_of_each(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["check", path.name, "--output-format", "sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    shown = []
    for result in run["results"]:
        rule = rules[result["ruleIndex"]]
        assert rule["id"] == result["ruleId"] and rule["help"]["text"] and rule["shortDescription"]["text"]
        (location,) = (each["physicalLocation"] for each in result["locations"])
        assert location["artifactLocation"]["uri"] == "ds%20config.json" and result["message"]["text"]
        shown.append((result["ruleId"], result["level"], location["region"]["startLine"]))
    assert shown == [
        ("wrong-stage", "warning", 6), ("wrong-type", "error", 7), ("clipping-missing", "note", 1),
    ]  # fmt: skip
    assert main(["check", path.name, "--output-format", "sarif", "--json"]) == 2


def test_lines_are_found_under_the_names_that_problems_have(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("output_dir: x\ngradient_checkpointing: true\ndeepspeed:\n  fp16:\n    enabled: true\n")
    lines = key_lines(path)
    assert lines["activation_checkpointing"] == 2 and lines["fp16.enabled"] == 5


@pytest.mark.parametrize("stage", [5, "auto", None, [2]])
def test_consequences_of_a_wrong_stage_are_not_listed(stage: Any) -> None:
    """With keys of every stage, of which some have no effect at any one of them; and one mistake at all of them."""
    zero = {**load("zero3-offload")["zero_optimization"], "allgather_bucket_size": 3, "round_robin_gradients": True}
    zero |= {"zenflow": {"update_interval": 4}, "stage": stage, "legacy_stage1": True}
    config = load("zero3-offload") | {"zero_optimization": zero, "gradient_allreduce_op": "sum"}
    shown = {problem.key for problem in check(Subject(config, {}, gpus=3))}
    assert {"zero_optimization.stage", "zero_optimization.legacy_stage1"} <= shown
    assert not shown & {"zero_optimization.allgather_bucket_size", "zero_optimization.sub_group_size"}
    right = {problem.key for problem in check(Subject(config | {"zero_optimization": zero | {"stage": 3}}, {}))}
    assert shown - {"zero_optimization.stage"} <= right


@pytest.mark.parametrize(("place", "key"), [("zero_optimization", "stgae"), ("", "stage")])
def test_nor_what_follows_from_a_misspelt_or_misplaced_stage(place: str, key: str) -> None:
    config = load("zero3-offload")
    stage = config["zero_optimization"].pop("stage")
    (config[place] if place else config)[key] = stage
    assert [problem.key for problem in check(Subject(config))] == [f"{place}.{key}".lstrip(".")]


def test_the_file_that_switches_on_what_a_gpu_lacks_is_named(tmp_path: Path, preset: Path) -> None:
    arguments = tmp_path / "args.yaml"
    arguments.write_text("output_dir: x\nbf16: true\n")
    (problem,) = check_file(preset, arguments, machine=OLD_GPU)
    assert (problem.file, problem.key, problem.severity) == (str(arguments), "bf16", "warning")
    assert "fp16: true" in problem.fix
    preset.write_text(json.dumps(load("zero2") | {"bf16": {"enabled": True}}))
    own = [problem for problem in check_file(preset, arguments, machine=OLD_GPU) if problem.rule == "bf16-emulated"]
    assert [(problem.file, problem.key) for problem in own] == [(str(preset), "bf16.enabled")]


@pytest.mark.parametrize(
    ("gpu", "arguments", "fits"),
    [
        ("8GB", {}, False),
        ("16GB", {}, True),  # the script may load the weights in 16 bits: 11.6 GiB
        ("16GB", {"fp16": True}, False),  # which needs fp32 weights
        ("8GB", {"optim": "adafactor"}, True),
        ("10GB", {"optim": "adamw_bnb_8bit"}, True),
        ("6GB", {"optim": "adamw_bnb_8bit"}, False),
        ("8GB", {"optim": "paged_adamw_32bit"}, True),  # its states may leave the GPU
        ("8GB", {"optim": "lion_32bit"}, True),  # unknown states
        ("6GB", {"optim": "lomo"}, True),
        ("2GB", {"optim": "lomo"}, False),
        ("8GB", {"use_peft": True}, True),
        ("8GB", {"fsdp": "full_shard"}, True),
        ("8GB", {"load_in_4bit": True}, True),
        ("8GB", {"deepspeed": "elsewhere.json"}, True),
        ("8GB", {"do_eval": True}, True),
        ("8GB", {"output_dir": "out-lora"}, True),
    ],
)
def test_the_least_memory_of_a_job_without_deepspeed(
    tmp_path: Path, gpt2_xl: ModelFacts, gpu: str, arguments: dict[str, Any], fits: bool
) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 8, **arguments}))
    job = {"model": gpt2_xl, "machine": MACHINE.with_gpu(gpu_of_size(gpu))}
    rules = [problem.rule for problem in check_file(path, **job)]
    assert ("card-too-small" not in rules) is fits


def test_every_variant_of_a_recipe_is_compared_with_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "recipes" / "gpt2-on-16gb.yaml"
    assert main(["check", str(path), "--gpu-memory", "620MB", "--ram", "32GB", "--json"]) == 1
    problems = [problem for problem in json.loads(capsys.readouterr().out) if problem["rule"] == "card-too-small"]
    assert {"resident", "lora"} <= {problem["key"].partition(":")[0].removeprefix("variants.") for problem in problems}


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("per_device_train_batch_size", "abc", True),
        ("max_steps", 3.5, True),
        ("max_steps", [3], True),
        ("learning_rate", "fast", True),
        ("max_steps", 3.0, False),
        ("save_steps", 0.5, False),
        ("num_train_epochs", 1, False),
        ("seed", None, False),
        ("max_steps", "${STEPS}", False),
        ("optim", "sgd", False),
    ],
)
def test_a_value_that_is_no_number(tmp_path: Path, name: str, value: Any, wrong: bool) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"output_dir": "out", name: value}))
    keys = [problem.key for problem in check_file(path) if problem.rule == "value-not-allowed"]
    assert keys == ([name] if wrong else [])


def test_a_recipe_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = ROOT / "recipes" / "gpt2-on-16gb.yaml"
    assert main(["check", str(original)]) == 0
    broken = tmp_path / "mine.yaml"
    broken.write_text(original.read_text().replace("sequences_per_step:", "sequences_per_stp:"))
    capsys.readouterr()
    assert main(["check", str(broken), "--json"]) == 1
    keys = {problem["key"] for problem in json.loads(capsys.readouterr().out)}
    assert "sequences_per_stp" in keys


@pytest.mark.parametrize(("precision", "fits"), [({}, False), ({"bf16": True}, True), ({"fp16": True}, True)])
def test_auto_is_what_the_arguments_say(
    tmp_path: Path, preset: Path, capsys: pytest.CaptureFixture[str], precision: dict[str, bool], fits: bool
) -> None:
    """A GPU of 36 GB holds gpt2-xl's states in 16 bit, and not in fp32."""
    arguments = tmp_path / "args.json"
    arguments.write_text(json.dumps({"output_dir": "x", **precision}))
    command = ["check", str(preset), "--args", str(arguments), "--model", "gpt2-xl", "--gpu-memory", "36GB"]
    assert main([*command, "--gpus", "1", "--json"]) == (0 if fits else 1)
    rules = [problem["rule"] for problem in json.loads(capsys.readouterr().out)]
    assert rules == ([] if fits else ["card-too-small"])


@pytest.mark.parametrize(
    ("text", "declined"),
    [
        ("{task: ner, model_name_or_path: x, seed: 1, training: {learning_rate: 2e-5, bf16: true}}", True),
        ("{model_name_or_path: x, optimizer: {learning_rate: 2.0e-5, type: adamw}}", False),
        ("{bf16: true, training: {learning_rate: 2e-5, bf16: true}}", False),
        ("{model_name_or_path: x, fsdp_config: {activation_checkpointing: true, seed: 1}}", False),
    ],
)
def test_arguments_in_a_section_are_not_taken_for_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, declined: bool
) -> None:
    (tmp_path / "args.yaml").write_text(text)
    assert main(["check", str(tmp_path / "args.yaml")]) == (2 if declined else 0)
    assert ("as a separate file" in capsys.readouterr().err) == declined


def test_a_file_that_is_not_checked_stops_no_other(
    tmp_path: Path, preset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = tmp_path / "run.yaml", tmp_path / "train.sh", tmp_path / "foo.json"
    for path, text in zip(others, ("apiVersion: v1\nkind: Job\n", "python train.py", '{"foo": 1}'), strict=True):
        path.write_text(text)
    assert main(["check", *map(str, others)]) == 2
    assert capsys.readouterr().err.count("memkit: error: ") == 3
    assert main(["check", str(preset), *map(str, others), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(each["rule"], each["severity"], each["file"]) for each in shown] == [
        ("not-checked", "hint", str(path)) for path in others
    ]
    (tmp_path / "args.yaml").write_text("output_dir: x\nevaluation_strategy: steps\n")
    assert main(["check", *map(str, others), str(tmp_path / "args.yaml")]) == 1
    assert "No known mistakes" not in capsys.readouterr().out
    assert main(["check", str(preset), str(others[0]), "--output-format", "sarif"]) == 0
    assert [each["ruleId"] for each in json.loads(capsys.readouterr().out)["runs"][0]["results"]] == ["not-checked"]


def test_llama_factory_s_arguments_are_compared_with_a_deepspeed_json(tmp_path: Path, preset: Path) -> None:
    """Its names and values are those of the transformers that it pins."""
    arguments = tmp_path / "llama.yaml"
    arguments.write_text(
        f"stage: sft\nfinetuning_type: full\ncutoff_len: 512\nwarmup_ratio: 0.1\nmax_grad_norm: 0.5\n"
        f"optim: adamw_hf\ndeepspeed: {preset.name}\n"
    )
    with pytest.raises(InputError, match=rf"{preset.name} --args"):
        check_file(arguments)
    assert check_file(preset, arguments) == []
    preset.write_text(json.dumps(load("zero2") | {"gradient_clipping": 1.0}))
    assert [(each.rule, each.key) for each in check_file(preset, arguments)] == [
        ("trainer-mismatch", "gradient_clipping")
    ]


def test_a_hard_coded_list_is_named_value_by_value(preset: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.99], "eps": 1e-8, "weight_decay": "auto"}}
    preset.write_text(json.dumps(load("zero2") | {"optimizer": optimizer}))
    shown = {each.key: each.why for each in check_file(preset) if each.rule == "hard-coded"}
    assert "adam_beta1=0.8, adam_beta2=0.99" in shown["optimizer.params.betas"]
    assert "adam_epsilon=1e-08" in shown["optimizer.params.eps"]


def test_a_model_alone_does_not_make_this_machine_the_job_s(tmp_path: Path) -> None:
    """Finds: settings of a GPU that are errors because the file is checked on a laptop."""
    arguments = tmp_path / "args.yaml"
    arguments.write_text("output_dir: out\ntf32: true\nbf16: true\n")
    assert main(["check", str(arguments), "--model", "gpt2-xl"]) == 0
    assert main(["check", str(arguments), "--model", "gpt2-xl", "--gpu", "T4"]) == 1
