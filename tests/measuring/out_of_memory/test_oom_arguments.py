"""The job's arguments under the names of other tools, and what else a log shows: the command, the platform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.cli import main
from hf_memkit.measuring.out_of_memory.surroundings import Surroundings
from tests.measuring.out_of_memory.oom_messages import EXAMPLES
from tests.measuring.out_of_memory.test_oom_advice import BACKWARD, TOP, explanation_of, frame, gpu, keys
from tests.measuring.out_of_memory.tracebacks import PLAIN

LAUNCHED = "/usr/bin/python -u -m deepspeed.launcher.launch --world_info=e train.py --deepspeed ds.json"


@pytest.mark.parametrize(
    ("arguments", "key", "current", "value"),
    [
        ({"micro_batch_size": 4}, "micro_batch_size", 4, 2),
        ({"train": {"train_bs": 6}}, "train_bs", 6, 3),
        ({"batch_size": 128, "micro_batch_size": 4}, "micro_batch_size", 4, 2),
        ({"training": {"batch_size": 4}}, "batch_size", 4, 2),
        ({"tokenize": {"batch_size": 1000}}, "per_device_train_batch_size", None, "half"),
        ({"training": {"per_device_train_batch_size": 6}}, "per_device_train_batch_size", 6, 3),
        ({"deepspeed": {"train_micro_batch_size_per_gpu": 4}}, "train_micro_batch_size_per_gpu", 4, 2),
        ({"learning_rate": 1e-4}, "per_device_train_batch_size", None, "half"),
        ({"per_device_train_batch_size": "auto"}, "per_device_train_batch_size", None, "half"),
    ],
)
def test_the_batch_is_the_users_under_the_users_name(
    arguments: dict[str, Any], key: str, current: object, value: object
) -> None:
    first = explanation_of(PLAIN + gpu(), arguments).changes[0]
    assert (first.key, first.current, first.value) == (f"arguments.{key}", current, value)


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        ({"micro_batch_size": 1}, "micro_batch_size"), ({"train_bs": 1}, "train_bs"),
        ({"run": {"micro_batch_size": 1}}, "per_device_train_batch_size"),
        ({"optimizer": "adafactor"}, "optim"), ({"use_8bit_adam": True, "deepspeed": "x"}, "optim"),
        ({"gradient_checkpointing": "unsloth"}, "activation_checkpointing"),
        ({"train_batch_size": 1, "use_8bit_adam": True, "resolution": 512}, "use_8bit_adam"),
        ({"model": {"enable_activation_checkpointing": True}}, "activation_checkpointing"),
    ],
)  # fmt: skip
def test_what_another_tool_has_set_is_not_proposed(arguments: dict[str, Any], absent: str) -> None:
    explanation = explanation_of(PLAIN + gpu(), arguments)
    assert absent not in keys(explanation) and explanation.changes
    assert not any(change.current == 8 for change in explanation.changes)


def test_the_eight_bit_optimizer_of_another_tool_is_paged_next() -> None:
    for arguments in ({"optimizer": "adamw_bnb_8bit"}, {"use_8bit_adam": True}):
        changes = {change.key: change.value for change in explanation_of(PLAIN + gpu(), arguments).changes}
        assert changes.get("arguments.optimizer", changes.get("arguments.optim")) == "paged_adamw_8bit"


@pytest.mark.parametrize(
    ("text", "noted", "first"),
    [
        ("train_batch_size: 6\n", False, ("train_batch_size", 6)),
        ("fsdp: [full_shard, auto_wrap]\nper_device_train_batch_size: 6\n", None, ("per_device_train_batch_size", 6)),
        ("bf16: auto\nmicro_batch_size: 6\n", True, ("micro_batch_size", 6)),
        ("per_device_train_batch_size: eight\n", True, ("per_device_train_batch_size", None)),
        ("per_device_train_batch_size: 2\nper_device_train_batch_size: 6\n", True, ("per_device_train_batch_size", 6)),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", True, ("per_device_train_batch_size", None)),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n", True,
         ("per_device_train_batch_size", None)),
        ("zero_optimization: {stage: 2}\ntrain_micro_batch_size_per_gpu: 6\n", False,
         ("train_micro_batch_size_per_gpu", 6)),
    ],
)  # fmt: skip
def test_an_argument_file_of_another_tool_stops_nothing(
    text: str, noted: bool | None, first: tuple[str, object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log, arguments = tmp_path / "train.log", tmp_path / "args.yaml"
    log.write_text(PLAIN + gpu())
    arguments.write_text(text)
    assert main(["explain", str(log), "--args", str(arguments), "--json"]) == 0
    captured = capsys.readouterr()
    (content,) = json.loads(captured.out)
    change = content["changes"][0]
    assert (change["key"], change["current"]) == (f"arguments.{first[0]}", first[1])
    if noted is not None:
        assert captured.err.count("\n") == noted and (not noted or "ignored" in captured.err)


def test_the_vocabulary_is_read_from_the_models_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"text_config": {"vocab_size": 70001}}')
    size = 8 * 2048 * 70001 * 4 / 2**30
    (tmp_path / "train.log").write_text(BACKWARD + gpu(f"{size:.2f} GiB"))
    (tmp_path / "args.yaml").write_text(
        f"model_name_or_path: {tmp_path}/model\nper_device_train_batch_size: 8\nmax_length: 2048\n"
    )
    assert main(["explain", f"{tmp_path}/train.log", "--args", f"{tmp_path}/args.yaml", "--json"]) == 0
    (content,) = json.loads(capsys.readouterr().out)
    assert content["found"]["place"] == "logits"


@pytest.mark.parametrize(
    ("line", "target", "arguments"),
    [
        ("$ python train.py --bf16 True", "train.py", ("--bf16", "True")),
        ("[1]+  Killed                  python src/train.py --lr 1e-4", "src/train.py", ("--lr", "1e-4")),
        ("['/opt/bin/python', '-u', 'train.py', '--local_rank=0', '--a', 'b c'] exits with return code = -9",
         "train.py", ("--a", "b c")),
        ("Command '['/usr/bin/python3.10', 'train.py', '--x']' died with <Signals.SIGKILL: 9>.", "train.py", ("--x",)),
        ("+ torchrun --nproc_per_node 4 --master_port 29500 src/train.py --bf16 > log.txt 2>&1", "src/train.py",
         ("--bf16",)),
        ("accelerate launch --config_file x.yaml scripts/sft.py --bs 8 | tee log", "scripts/sft.py", ("--bs", "8")),
        (f"cmd = {LAUNCHED}", "train.py", ("--deepspeed", "ds.json")),
        ("python -m torch.distributed.run --nproc_per_node=2 -m trl.scripts.sft --max_length 10", "-m trl.scripts.sft",
         ("--max_length", "10")),
        ("uv run train.py --bs 4", "train.py", ("--bs", "4")),
        ("$ uv run --with trl python train.py --bs 4", "train.py", ("--bs", "4")),
        ("poetry run accelerate launch -m training.trainer --bs 4", "-m training.trainer", ("--bs", "4")),
        ("pixi run train.py --bs 4", "train.py", ("--bs", "4")),
        ("conda run -n x --no-capture-output scripts/train.py --bs 4", "scripts/train.py", ("--bs", "4")),
        ("deepspeed --num_gpus 2 --module training.trainer --bs 4", "-m training.trainer", ("--bs", "4")),
        ("['/opt/bin/python', '-m', 'training.trainer', '--local_rank=0', '--bs', '4'] exits with return code = 1",
         "-m training.trainer", ("--bs", "4")),
        ('Command "python train.py" returned non-zero exit status 137', "train.py", ()),
        ('Command "/opt/bin/python3.9 train.py --bf16 True --bs 4", exit code: 1', "train.py",
         ("--bf16", "True", "--bs", "4")),
        ("$ WANDB_MODE=off python train.py \\\n    --bf16 True \\\n    --bs 4", "train.py",
         ("--bf16", "True", "--bs", "4")),
        ("torchrun --nproc_per_node 2 \\\r\n  train.py \\\r\n  --bs 4\r", "train.py", ("--bs", "4")),
    ],
)  # fmt: skip
def test_the_command_in_a_log(line: str, target: str, arguments: tuple[str, ...]) -> None:
    seen = Surroundings()
    for part in f"{line}\n".splitlines(keepends=True):
        seen.see(part)
    assert seen.command is not None and (seen.command.target, seen.command.arguments) == (target, arguments)


@pytest.mark.parametrize(
    "line",
    ['  File "/usr/lib/python3.10/runpy.py", line 196, in x', "python version 3.11", "Using python: see train.py",
     "/x/lib/python3.11/site-packages/torch/utils/checkpoint.py:12: UserWarning: use_reentrant"],
)  # fmt: skip
def test_what_is_no_command(line: str) -> None:
    seen = Surroundings()
    seen.see(line)
    assert seen.command is None


@pytest.mark.parametrize(
    ("command", "file", "known"),
    [
        ("torchrun --nproc_per_node 2 -m training.trainer", "/w/training/trainer.py", True),
        ("python -m training.trainer", "training/trainer.py", True),
        ("python -m training", "/w/training/__main__.py", True),
        ("deepspeed --module training.trainer", "C:\\w\\training\\trainer.py", True),
        ("python -m training.trainer", "/w/other/trainer.py", False),
    ],
)  # fmt: skip
def test_the_arguments_of_a_module_that_a_frame_names(command: str, file: str, known: bool) -> None:
    own = "--per_device_train_batch_size 4 --gradient_checkpointing True"
    top = TOP + f'  File "{file}", line 9, in <module>\n    main()\n'
    explanation = explanation_of(f"{command} {own}\n{PLAIN.replace(TOP, top)}{gpu()}")
    first = explanation.changes[0]
    assert (first.current, first.value) == ((4, 2) if known else (None, "half"))
    assert ("activation_checkpointing" in keys(explanation)) is not known
    target = f"-m {command.split()[-1]}" if known else file
    gpus = " --gpus 2" if "torchrun" in command else ""
    assert explanation.next_steps[0] == f"memkit predict {target} --gpu 24GB{gpus} -- {own if known else 'ARGUMENTS'}"


@pytest.mark.parametrize(
    ("line", "value", "helps"),
    [
        ("export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", "0.0", False),
        ('os.environ["PYTORCH_MPS_HIGH_WATERMARK_RATIO"] = "0.0"', "0.0", False),
        ("%env PYTORCH_MPS_HIGH_WATERMARK_RATIO=0", "0", False),
        ("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.7 python train.py", "0.7", True),
        ("step 1", None, True),
    ],
)  # fmt: skip
def test_a_limit_of_mps_that_the_log_lifts_is_not_lifted_again(line: str, value: str | None, helps: bool) -> None:
    error = next(example.text for example in EXAMPLES if example.name == "MPS, GB that are GiB")
    for text in (error, error.replace("Use ", "Use\n"), error.replace("0.0 ", "0.0\n")):
        seen = Surroundings()
        for one in f"{line}\n{text}\n".splitlines(keepends=True):
            seen.see(one)
        assert seen.watermark == value
        verdict = explanation_of(f"{line}\n{text}").verdict
        assert verdict is not None and verdict.cause == "cap"
        (lift,) = verdict.settings if helps else verdict.no_help
        assert (lift.key, lift.value) == ("environment.PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.0")
        assert not (verdict.no_help if helps else verdict.settings)


USERS = '  File "/home/me/job/train.py", line 40, in <module>\n    main()\n'


def test_what_to_type_next() -> None:
    explanation = explanation_of(PLAIN.replace(TOP, TOP + USERS) + gpu())
    assert explanation.next_steps == (
        "memkit predict /home/me/job/train.py --gpu 24GB -- ARGUMENTS",
        "memkit plan /home/me/job/train.py --gpu 24GB -- ARGUMENTS",
    )
    assert all(step in explanation.text() for step in explanation.next_steps)
    command = "$ python train.py --per_device_train_batch_size 6 --bf16\n"
    explanation = explanation_of(command + PLAIN.replace(TOP, TOP + USERS) + gpu(total="79.11 GiB", free="2.00 MiB"))
    assert explanation.next_steps[1] == "memkit plan train.py --gpu 80GB -- --per_device_train_batch_size 6 --bf16"
    assert (explanation.changes[0].current, explanation.changes[0].value) == (6, 3), "by the command in the log"
    assert explanation_of(command + "Killed").next_steps == (
        "memkit predict train.py -- --per_device_train_batch_size 6 --bf16",
    )
    assert explanation_of(PLAIN + gpu()).next_steps == ()
    assert explanation_of(command + gpu(device="NPU")).next_steps == (), "memkit predicts NVIDIA GPUs"


@pytest.mark.parametrize(
    ("line", "platform", "allocator"),
    [
        ("/Users/me/job/train.py:3: UserWarning: x", "macOS", None),
        ('  File "C:\\Users\\me\\job\\train.py", line 3, in <module>', "Windows", None),
        ("Linux 5.15.153.1-microsoft-standard-WSL2", "WSL2", None),
        ("  File \"/mnt/c/job/train.py\", line 3", "WSL2", None),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", None, "expandable_segments:True"),
        ("os.environ['PYTORCH_ALLOC_CONF'] = 'max_split_size_mb:128'", None, "max_split_size_mb:128"),
        ("If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
         "avoid fragmentation.", None, None),
        ("RuntimeError: [enforce fail at ..\\c10\\core\\CPUAllocator.cpp:73] data. x", "Windows", None),
        ("/home/me/train.py", None, None),
    ],
)  # fmt: skip
def test_system_and_allocator_settings_in_a_log(line: str, platform: str | None, allocator: str | None) -> None:
    seen = Surroundings()
    seen.see(line)
    assert (seen.platform, seen.allocator) == (platform, allocator)


def test_what_the_system_does_not_have_is_not_proposed() -> None:
    pieces = gpu("2.00 GiB", allocated="18.05 GiB", cached="4.90 GiB")
    windows = '  File "C:\\Users\\me\\job\\train.py", line 3, in <module>\n    x\n'

    def fixes(text: str) -> list[str]:
        verdict = explanation_of(text).verdict
        assert verdict is not None
        return [one.value for one in verdict.settings]

    assert fixes(pieces) == ["expandable_segments:True", "max_split_size_mb:2048"]
    assert fixes(TOP + windows + pieces) == ["max_split_size_mb:2048"]
    assert fixes("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py\n" + pieces) == []
    assert fixes("/Users/me/train.py:3: UserWarning\nKilled")[0].startswith("log show")
    assert fixes("Killed")[0].startswith("dmesg")
    exited = "RuntimeError: DataLoader worker (pid(s) 1234) exited unexpectedly"
    assert fixes(exited)[0].startswith("docker") and fixes(TOP + windows + exited) == [], "/dev/shm is Linux'"
    eight = {"optim": "adamw_bnb_8bit"}
    assert "optim" in keys(explanation_of(PLAIN + gpu(), eight))
    assert "optim" not in keys(explanation_of("on /mnt/c/job\n" + PLAIN + gpu(), eight)), "no managed memory on WSL2"


def test_scripts_of_diffusers_have_their_own_names() -> None:
    unet = TOP + frame("diffusers/models/attention_processor.py", "get_attention_scores", "x = torch.baddbmm(") + gpu()
    explanation = explanation_of(unet, {"train_batch_size": 4, "resolution": 1024})
    assert keys(explanation) == ["enable_xformers_memory_efficient_attention", "train_batch_size", "resolution"]
    assert keys(explanation_of(gpu(), {"train_batch_size": 1, "resolution": 1024})) == [
        "gradient_checkpointing", "use_8bit_adam", "resolution",
    ]  # fmt: skip


def test_accumulation_is_the_users_too() -> None:
    for arguments, part in (
        ({"micro_batch_size": 4, "grad_accum_steps": 3}, "grad_accum_steps 3 → 6"),
        ({"micro_batch_size": 4}, "gradient_accumulation_steps by 2"),
    ):
        assert part in explanation_of(PLAIN + gpu(), arguments).changes[0].reason


@pytest.mark.parametrize(
    "command",
    ["swift sft --per_device_train_batch_size 6", "$ trl sft --per_device_train_batch_size 6 > log",
     "NPROC_PER_NODE=2 swift sft \\\n    --lora_rank 8 \\\n    --per_device_train_batch_size 6"],
)  # fmt: skip
def test_the_arguments_of_a_tool_that_names_no_script(command: str) -> None:
    explanation = explanation_of(f"{command}\n{PLAIN.replace(TOP, TOP + USERS)}{gpu()}")
    assert (explanation.changes[0].current, explanation.changes[0].value) == (6, 3)
    assert explanation.next_steps == () and explanation.fitted


def test_a_command_without_arguments_fits_nothing() -> None:
    explanation = explanation_of(f"$ python train.py\n{PLAIN}{gpu()}")
    assert not explanation.fitted and explanation.next_steps


@pytest.mark.parametrize(
    ("log", "command"),
    [
        ("torchrun --nproc_per_node 4 train.py --bf16", "train.py --gpu 24GB --gpus 4 -- --bf16"),
        ("python -m torch.distributed.run --nnodes=2 --nproc-per-node=8 train.py --bf16",
         "train.py --gpu 24GB --gpus 8 --nodes 2 -- --bf16"),
        ("torchrun --nnodes 1:2 --nproc_per_node gpu train.py --bf16\nworld_size=16",
         "train.py --gpu 24GB --gpus 8 --nodes 2 -- --bf16"),
        ("deepspeed --num_gpus 2 train.py --deepspeed ds.json", "train.py --gpu 24GB --gpus 2 -- --deepspeed ds.json"),
        ("deepspeed --include localhost:1,3 train.py --bf16", "train.py --gpu 24GB --gpus 2 -- --bf16"),
        ("deepspeed train.py --bf16\n[INFO] [launch.py:164:main] dist_world_size=8",
         "train.py --gpu 24GB --gpus 8 -- --bf16"),
        ("accelerate launch --config_file fsdp.yaml train.py --bf16\n[rank1]: x",
         "--gpu 24GB -- accelerate launch --config_file fsdp.yaml train.py --bf16"),
        ("accelerate launch --use_fsdp --num_processes 2 -m job.train", "--gpu 24GB -- accelerate launch --use_fsdp "
         "--num_processes 2 -m job.train ARGUMENTS"),
        ("accelerate launch train.py --bf16\n[rank1]: x", "--gpu 24GB --gpus 2 -- accelerate launch train.py --bf16"),
        ("mp_world_size=16\nINFO world_size=1 rank 0 vllm engine\n[rank7]: x",
         "/home/me/job/train.py --gpu 24GB --gpus 8 -- ARGUMENTS"),
        ("[rank0]: x\n[rank3]: x", "/home/me/job/train.py --gpu 24GB --gpus 4 -- ARGUMENTS"),
        ("  rank      : 9 (local_rank: 1)", "/home/me/job/train.py --gpu 24GB --gpus 2 -- ARGUMENTS"),
        ("python train.py --bf16", "train.py --gpu 24GB -- --bf16"),
    ],
)  # fmt: skip
def test_the_job_of_several_processes_is_predicted_with_them(log: str, command: str) -> None:
    explanation = explanation_of(f"{log}\n{PLAIN.replace(TOP, TOP + USERS)}{gpu()}")
    assert explanation.next_steps == (f"memkit predict {command}", f"memkit plan {command}")
