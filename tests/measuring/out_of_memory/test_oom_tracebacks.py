"""What a traceback tells: real ones, where an allocation of the installed libraries fails, and older ones."""

from __future__ import annotations

import contextlib
import json
import linecache
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_memkit.catalog.library_versions import to_installed_arguments
from hf_memkit.cli import main
from hf_memkit.measuring.out_of_memory import Explanation, explain_oom, find_messages
from tests.measuring.out_of_memory.oom_messages import EXAMPLES
from tests.measuring.out_of_memory.tracebacks import LAYER, OLDER, PLAIN

SIZE = next(example.text for example in EXAMPLES if example.name == "torch 2.2-2.9: size")
LARGER = next(example.text for example in EXAMPLES if "larger than the GPU" in example.name)  # 32 GiB of 23.52


@contextlib.contextmanager
def fails_at(file: str, function: str, source: str, nth: int) -> Iterator[None]:
    """Raises at the nth line of that function that holds `source`: every frame above is the libraries' own."""
    seen = 0

    def in_function(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if event == "line" and source in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            seen += 1
            if seen == nth:
                raise torch.OutOfMemoryError(SIZE)
        return in_function

    def tracer(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        return in_function if code.co_name == function and code.co_filename.endswith(file) else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)


def explained(folder: Path, where: tuple[str, str, str], nth: int = 1, **more: Any) -> Explanation:
    attention, metrics = more.pop("attention", "eager"), more.pop("metrics", None)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    rows = [{"input_ids": list(range(8)), "labels": list(range(8))} for _ in range(4)]
    settings = {"use_cpu": True, "report_to": "none", "max_steps": 1, "per_device_train_batch_size": 2,
                "per_device_eval_batch_size": 2, "disable_tqdm": True, "save_strategy": "no"}  # fmt: skip
    arguments = TrainingArguments(str(folder), **to_installed_arguments({**settings, **more}))
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics)
    with pytest.raises(torch.OutOfMemoryError) as error, fails_at(*where, nth):
        trainer.evaluate() if metrics else trainer.train()
    steps = traceback.extract_tb(error.value.__traceback__)
    lines = traceback.format_list([step for step in steps if step.filename != __file__])
    return explain_oom("".join(["Traceback (most recent call last):\n", *lines, f"torch.OutOfMemoryError: {SIZE}\n"]))


ATTENTION = ("modeling_llama.py", "eager_attention_forward", "torch.matmul(query")
SAVES = {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 1}
PLACES: dict[str, tuple[tuple[str, str, str], dict[str, Any], tuple[str | None, str | None], set[str], str]] = {
    "mlp": (("modeling_llama.py", "forward", "self.down_proj("), {}, (None, None), set(),
            "per_device_train_batch_size"),
    "saving": (("safetensors/torch.py", "save_file", "serialize_file("), SAVES, (None, None), set(),
               "save_only_model"),
    "logits": (("loss_utils.py", "ForCausalLMLoss", "logits.float()"), {}, ("logits", None), set(),
               "use_liger_kernel"),
    "lm_head": (("modeling_llama.py", "forward", "self.lm_head("), {}, ("logits", None), set(), "use_liger_kernel"),
    "autocast": (("operations.py", "_convert_to_fp32", ".float()"), {"bf16": True}, ("logits", None), set(),
                 "use_liger_kernel"),
    "cross entropy": (("functional.py", "cross_entropy", "cross_entropy_loss("), {}, ("cross entropy", None), set(),
                      "use_liger_kernel"),
    "label smoothing": (("functional.py", "log_softmax", "log_softmax("), {"label_smoothing_factor": 0.1},
                        ("cross entropy", None), {"label smoothing"}, "chunked_loss"),
    "scores": (ATTENTION, {}, ("attention", None), set(), "attn_implementation"),
    "sdpa": (("sdpa_attention.py", "sdpa_attention_forward", "scaled_dot_product_attention("), {"attention": "sdpa"},
             ("attention", None), {"SDPA"}, "attn_implementation"),
    "scores, again": (ATTENTION, {"nth": 3, "activation_checkpointing": True}, ("attention", None), {"checkpointing"},
                      "attn_implementation"),
    "recomputed": (("modeling_llama.py", "forward", "self.down_proj("), {"nth": 3, "activation_checkpointing": True},
                   ("recomputation", None), {"checkpointing"}, "per_device_train_batch_size"),
    "torch": (("optim/adam.py", "_init_group", "zeros_like("), {"optim": "adamw_torch"},
              ("optimizer states", "PyTorch"), set(), "optim"),
    "bitsandbytes": (("optim/optimizer.py", "get_state_buffer", "zeros_like("), {"optim": "adamw_bnb_8bit"},
                     ("optimizer states", "bitsandbytes"), set(), "optim"),
    "torchao": (("optim/adam.py", "_new_buffer", "zeros_like("), {"optim": "adamw_torch_8bit"},
                ("optimizer states", "torchao"), set(), "optim"),
    "gathering": (("trainer_pt_utils.py", "nested_concat", "torch_pad_and"), {"metrics": lambda _: {}},
                  ("predictions of an evaluation", None), set(), "preprocess_logits_for_metrics"),
}  # fmt: skip


PHASES = {"scores, again": "backward", "recomputed": "backward", "saving": "save", "gathering": "evaluate",
          **dict.fromkeys(("torch", "bitsandbytes", "torchao"), "optimizer")}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLACES)
def test_an_allocation_that_fails_in_the_real_library_leads_to_the_technique(name: str, tmp_path: Path) -> None:
    where, options, place, in_use, first = PLACES[name]
    explanation = explained(tmp_path, where, **options)
    assert explanation.error is not None
    traced = explanation.error.trace
    assert ((traced.place, traced.library), traced.in_use) == (place, in_use), traced
    assert traced.frame is None if place == (None, None) else str(traced.frame)[0] != "/"
    assert explanation.error.phase == PHASES.get(name, "forward")
    assert explanation.changes[0].key.endswith(f".{first}")
    values = {change.key: change.value for change in explanation.changes}
    if name == "sdpa":
        assert values["model.attn_implementation"] == "flash_attention_2", "SDPA is in use"
    if name in ("bitsandbytes", "torchao"):
        assert values["arguments.optim"] == "paged_adamw_8bit", "8 bits are in use"
    if "checkpointing" in in_use:
        assert not any("checkpointing" in key for key in values)


@pytest.mark.parametrize("name", OLDER)
def test_older_versions_notebooks_and_boxes(name: str) -> None:
    text, place, library = OLDER[name]
    explanation = explain_oom(f"{text}torch.cuda.OutOfMemoryError: {SIZE}\n")
    assert explanation.error is not None and explanation.changes
    assert (explanation.error.trace.place, explanation.error.trace.library) == (place, library)
    ranked = "\n".join(f"[rank1]: {line}\n[rank0]: x" for line in f"{text}{SIZE}".splitlines())
    (error, *_) = [explain_oom(ranked).error]
    assert error is not None and (error.rank, error.trace.place) == (1, place)


PREFIXES: dict[str, Callable[[int, str], str]] = {
    "docker compose": lambda number, line: f"trainer-1  | {line}",
    "kubectl": lambda number, line: f"[pod/trainer-0/pytorch] {line}",
    "stern": lambda number, line: f"trainer-0 pytorch {line}",
    "containerd": lambda number, line: f"2026-01-31T12:00:{number:02d}.123456789Z stderr F {line}",
    "docker": lambda number, line: json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-01-31T12:00Z"}),
    "Kaggle": lambda number, line: f"{1234 + number}.5s\t{45 + number}\t{line}",
    "SageMaker": lambda number, line: f"[1,mpirank:0,algo-1]<stderr>:{line}",
    "journal": lambda number, line: f"Nov 02 10:11:{number:02d} gpuhost python3[4321]: {line}",
    "pdsh": lambda number, line: f"worker-0: {line}",
    "pdsh, an address and a rank": lambda number, line: f"10.0.0.3: [rank3]: {line}",
    "glog": lambda number, line: f"E0912 11:54:{number:02d}.366 123 x.py:21] {line}",
    "vLLM": lambda number, line: f"(EngineCore_DP0 pid=1234) ERROR 02-07 18:18:59 [core.py:824] {line}",
    "Ray": lambda number, line: f"\x1b[36m(RayTrainWorker pid=4321, ip=10.0.0.7)\x1b[0m {line}",
    "Lightning": lambda number, line: f"[rank: 0] {line}",
    "logging": lambda number, line: f"2026-01-31 12:00:{number:02d},123 - __main__ - ERROR - {line}",
    "loguru": lambda number, line: f"2026-01-31 12:00:{number:02d}.123 | ERROR    | __main__:main:31 - {line}",
    "a quotation": lambda number, line: f"> > {line}",
    "line numbers": lambda number, line: f"{100 + number:5d}  {line}",
    "nobody knows": lambda number, line: f"<job#17 @ {100 + 7 * number} ms> {line}",
    "nobody knows either": lambda number, line: f"node=gpu-07 t={number * 1.5:.2f} :: {line}",
}  # fmt: skip
LOSS = (
    "Traceback (most recent call last):\n"
    '  File "/w/train.py", line 20, in <module>\n    trainer.train()\n'
    '  File "/e/site-packages/transformers/trainer.py", line 3318, in training_step\n'
    "    loss = self.compute_loss(model, inputs)\n           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
    '  File "/e/site-packages/torch/nn/functional.py", line 3494, in cross_entropy\n'
    f"    return torch._C._nn.cross_entropy_loss(\n{SIZE}"
)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_frames_are_read_behind_any_prefix_and_without_the_first_lines(prefix: str) -> None:
    before = ["step 1", "{'loss': 2.1}", "{'loss': 2.0}"]
    for lines in (LOSS.splitlines(), LOSS.splitlines()[3:]):
        (error,) = find_messages("\n".join(PREFIXES[prefix](*line) for line in enumerate([*before, *lines])))
        assert (error.phase, error.trace.place) == ("forward", "cross entropy")
        assert error.trace.frame == "torch/nn/functional.py, cross_entropy: return torch._C._nn.cross_entropy_loss(…)"
        assert error.message.free_bytes is not None
    for word, form in (("Killed", "sigkill"), ("MemoryError", "memory-error")):
        (error,) = find_messages("\n".join(PREFIXES[prefix](*line) for line in enumerate([*before, word, "end"])))
        assert error.message.form == form
    wrapped = textwrap.wrap(SIZE, 80)
    (error,) = find_messages("\n".join(PREFIXES[prefix](*line) for line in enumerate([*before, *wrapped])))
    assert error.message.reserved_bytes is not None


@pytest.mark.parametrize("prefix", ["docker compose", "kubectl", "journal", "pdsh", "vLLM", "Ray"])
def test_processes_that_write_at_once_keep_their_own_frames(prefix: str) -> None:
    other = LOSS.replace("cross_entropy", "log_softmax").replace("GPU 0", "GPU 3").splitlines()
    twins = {
        "trainer-1": "trainer-2",
        "trainer-0": "trainer-7",
        "4321": "4322",
        "worker-0": "worker-1",
        "1234": "1235",
    }
    lines = []
    for number, (mine, his) in enumerate(zip(LOSS.splitlines(), other, strict=True)):
        twin = PREFIXES[prefix](number, his)
        for name, another in twins.items():
            twin = twin.replace(name, another)
        lines += [PREFIXES[prefix](number, mine), twin]
    frames = {one.message.device: one.trace.frame for one in find_messages("\n".join(lines))}
    assert "cross_entropy:" in str(frames[0]) and "log_softmax:" in str(frames[3])


def test_the_links_of_a_copied_notebook_cell_are_no_part_of_its_frames() -> None:
    path = (
        "[/usr/local/lib/python3.10/dist-packages/transformers/{}](https://localhost:8080/#) in {}(tensor1, tensor2)"
    )
    log = "\n".join((
        "OutOfMemoryError                          Traceback (most recent call last)",
        path.format("trainer.py", "evaluation_loop"), path.format("trainer_pt_utils.py", "torch_pad_and_concatenate"),
        "---> 91     result = tensor1.new_full(new_shape, padding_index)", SIZE,
    ))  # fmt: skip
    (error,) = find_messages(log)
    assert (error.phase, error.trace.place) == ("evaluate", "predictions of an evaluation")


def test_a_traceback_that_was_caught_long_ago_is_not_the_message_s() -> None:
    caught = LOSS.rpartition("\n")[0] + "\nKeyError: 'x'\n" + "{'loss': 1.0}\n" * 100
    for message in ("RuntimeError: CUDA error: out of memory", "container exited with code 137"):
        (error,) = find_messages(caught + message)
        assert (error.phase, error.trace.place) == (None, None)


_PINNING = (
    '  File "/x/torch/utils/data/_utils/pin_memory.py", line 64, in pin_memory\n    return data.pin_memory(device)\n'
)


@pytest.mark.parametrize(
    ("above", "memory"),
    [
        (_PINNING, "pinned"),
        (_PINNING + "           ^^^^^^^^^^^^^^^\n", "pinned"),
        ('  File "/x/offload.py", line 64, in buffers\n    return torch.empty(count, pin_memory=True)\n', "pinned"),
        ('  File "/x/offload.py", line 64, in forward\n    saved = x.to("cpu", non_blocking=True)\n', "pinned"),
        ('  File "/x/offload.py", line 64, in forward\n    saved = x.to("cpu", non_blocking = True)\n', "pinned"),
        ('  File "/x/trainer.py", line 64, in training_step\n    loss.backward()\n', "device"),
        ('        "pin_memory": true\n', "device"),
        ("{'dataloader_pin_memory': True, 'x': 1}\n", "device"),
        (
            "dataloader.py:683: UserWarning: 'pin_memory' argument is set as true but no accelerator is found\n",
            "device",
        ),
        (_PINNING + "KeyError: 'x'\n" + LOSS.rpartition("\n")[0] + "\n", "device"),
    ],
)
def test_page_locked_ram_is_what_a_frame_asks_for_and_not_a_word_in_the_log(above: str, memory: str) -> None:
    (error,) = find_messages(f"{above}RuntimeError: CUDA error: out of memory")
    assert error.message.memory == memory


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("Loading checkpoint shards:  33%|███        | 1/3 [00:14<00:28, 14.31s/it]", "load"),
        ("Loading weights: 100%|██████| 290/290 [00:14<00:00, 14.31it/s]", "load"),
        ("Map (num_proc=8):  12%|█▏        | 1200/10000 [00:03<00:27, 325.12 examples/s]", "data"),
        ("Running tokenizer on dataset:  45%|████▌     | 45000/100000 [00:21<00:26, 2074.88 examples/s]", "data"),
        ("Map: 100%|██████████| 10000/10000 [00:30<00:00, 325.12 examples/s]", None),
        ("Saving the dataset (0/2 shards):  50%|█████     | 5000/10000 [00:03<00:02]", "data"),
        ("Saving model checkpoint to out/checkpoint-500", "save"),
        ("Loading model from out/checkpoint-500.", "resume"),
        ("***** Running Evaluation *****", "evaluate"),
        ("***** Running training *****", None),
        ("{'train_runtime': 12.3, 'train_samples_per_second': 40.1, 'train_loss': 1.2, 'epoch': 3.0}", "after"),
        ("  train_runtime            = 0:00:12.34", "after"),
        ("{'loss': 2.1, 'learning_rate': 1e-05}", None),
    ],
)
def test_the_last_lines_before_a_kill_tell_the_phase(line: str, phase: str | None) -> None:
    earlier = "Loading checkpoint shards: 100%|████| 3/3 [00:14<00:00, 14.31s/it]\n" if phase is None else ""
    for kill in ("Killed", "[1]+  Killed   python train.py", "['python', 'x.py'] exits with return code = -9"):
        (error,) = find_messages(f"{earlier}{line}\n{kill}")
        assert error.phase == phase
    (glued,) = find_messages(f"{earlier}{line}\rzsh: killed     python train.py")
    assert glued.phase == phase


def test_what_frames_show_is_not_proposed_and_what_they_do_not_show_is() -> None:
    keys = [{change.key for change in explain_oom(text + SIZE).changes} for text in (PLAIN, LAYER)]
    assert "arguments.activation_checkpointing" in keys[0] and "arguments.activation_checkpointing" not in keys[1]
    logits = OLDER["logits"][0]
    liger = '  File "/x/site-packages/liger_kernel/model/llama.py", line 90, in lce_forward\n    logits = x.float()\n'
    for text, offered in ((logits, True), (logits + liger, False), (logits.replace("llama", "gpt2"), False)):
        keys = {change.key for change in explain_oom(text + SIZE).changes}
        assert ("arguments.use_liger_kernel" in keys) is offered, text


ARGUMENTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "optim": "adamw_torch"}


@pytest.mark.parametrize(
    ("text", "arguments", "key", "expected"),
    [
        (PLAIN, {"gradient_checkpointing": True}, "activation_checkpointing", None),
        (PLAIN, {"per_device_train_batch_size": 1}, "per_device_train_batch_size", None),
        (PLAIN, {}, "per_device_train_batch_size", "half"),  # the script may have another default
        (PLAIN, {"optim": "adamw_bnb_8bit"}, "optim", "paged_adamw_8bit"),
        (PLAIN, {"optim": "paged_adamw_8bit"}, "optim", None),
        (PLAIN, {"optim": "adafactor"}, "optim", None),
        (PLAIN, {"deepspeed": "ds.json"}, "optim", None),
        (PLAIN, {"gradient_checkpointing": True, "optim": "sgd", "max_length": 2048}, "max_length", 1024),
        (OLDER["logits"][0], {"use_liger_kernel": True}, "use_liger_kernel", None),
        (OLDER["evaluation"][0], {"eval_accumulation_steps": 16}, "eval_accumulation_steps", 8),
        (OLDER["evaluation"][0], {"eval_accumulation_steps": 1}, "eval_accumulation_steps", None),
        (OLDER["softmax"][0], {"attn_implementation": "flash_attention_2"}, "attn_implementation", None),
    ],
)
def test_what_is_set_already_is_not_proposed(text: str, arguments: dict[str, Any], key: str, expected: object) -> None:
    changes = {change.key.rpartition(".")[2]: change.value for change in explain_oom(text + SIZE, arguments).changes}
    assert changes.get(key) == expected and changes


@pytest.mark.parametrize(
    ("text", "arguments", "why", "batch"),
    [
        ("", None, "fewer than 2 samples", True),
        (OLDER["logits"][0], {"per_device_train_batch_size": 1}, "No batch size", False),
        (OLDER["torch 1"][0], None, "No batch size", False),
        ("", {"per_device_train_batch_size": 8}, "at most 5 of the 8", True),  # 32 GiB × 5/8 = 20 GiB of 23.52
    ],
)
def test_a_tensor_larger_than_the_gpu(text: str, arguments: dict[str, Any] | None, why: str, batch: bool) -> None:
    explanation = explain_oom(text + LARGER, arguments)
    assert explanation.verdict is not None and why in explanation.verdict.why
    keys = {change.key for change in explanation.changes}
    assert ("arguments.per_device_train_batch_size" in keys) is batch
    assert "arguments.activation_checkpointing" not in keys, "it makes no tensor smaller"
    values = {change.key: change.value for change in explain_oom(LARGER, {"per_device_train_batch_size": 24}).changes}
    assert values["arguments.per_device_train_batch_size"] == 12  # 16 samples are 21 GiB of 23.52
    values = {change.key: change.value for change in explain_oom(LARGER.replace("32.00", "64.00"), ARGUMENTS).changes}
    assert values["arguments.per_device_train_batch_size"] == 2
    two = explain_oom(LARGER.replace("32.00", "64.00"), {"per_device_train_batch_size": 2})  # 32 GiB a sample
    assert not any("batch_size" in change.key for change in two.changes)


def test_a_job_is_never_told_to_end_itself() -> None:
    for example in EXAMPLES:
        for change in (*(explain_oom(example.text).verdict or pytest.fail()).settings,):
            assert "end it" not in change.reason and "kill" not in change.value.split("grep")[0]
    # In a container its own entry has the host's number: the one that holds no less than PyTorch reserved.
    own = next(example.text for example in EXAMPLES if "its own entry" in example.name).replace(
        "255.75 MiB is", "1.75 GiB is"
    )
    assert "1448259" not in explain_oom(own).text()


def test_args_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log, arguments = tmp_path / "train.log", tmp_path / "args.yaml"
    log.write_text(PLAIN + SIZE)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    arguments.write_text("per_device_train_batch_size: 8\ndeepspeed: ds.json\n")
    assert main(["explain", str(log), "--args", str(arguments), "--json"]) == 0
    (content,) = json.loads(capsys.readouterr().out)
    assert content["changes"][0]["current"] == 8 and content["changes"][0]["value"] == 4
    assert (content["found"]["phase"], content["found"]["place"], content["found"]["in_use"]) == ("forward", None, [])
    assert not any("offload" in str(change["value"]) for change in content["changes"]), "in use, by the file named"
    for text, part in (
        ("per_device_train_batch_size: eight\n", "per_device_train_batch_size=eight: expected int"),
        ("a: 1\na: 2\n", "appears twice"),
        ("evaluation_strategy: steps\nper_device_train_batch_size: 8\n", "eval_strategy"),
        ("base_model: x\nmicro_batch_size: 2\nbf16: auto\n", "axolotl"),
    ):
        arguments.write_text(text)
        assert main(["explain", str(log), "--args", str(arguments)]) == 0, "the log is explained all the same"
        assert part in capsys.readouterr().err
    assert main(["explain", str(log), "--args", str(tmp_path / "no.yaml")]) == 2
    assert main(["explain", str(tmp_path), "--args", str(arguments)]) == 2
    assert "--args" in capsys.readouterr().err
    arguments.write_text("a: [1\n")
    assert main(["explain", str(log), "--args", str(arguments)]) == 2


RICH = (
    "╭───────────────────── Traceback (most recent call last) ──────────────────────╮",
    "│ /e/lib/python3.10/site-packages/transformers/trainer.py:3318 in              │",
    "│ training_step                                                                │",
    "│ ❱ 3318 │   loss = self.compute_loss(model, inputs)                           │",
    "│   3319 │   attn_weights = torch.matmul(query, key)                           │",
    "│                                                                              │",
    "│ /e/lib/python3.10/site-packages/transformers/models/llama/modeling_lla       │",
    "│ ma.py:1372 in forward                                                        │",
    "│ ❱ 1372 │   x = self.layers(x)                                                │",
    "│ /e/lib/python3.10/site-packages/torch/nn/functional.py:3086 in               │",
    "│ cross_entropy                                                                │",
    "│ ❱ 3086 │   return torch._C._nn.cross_entropy_loss(x)                         │",
    "╰──────────────────────────────────────────────────────────────────────────────╯",
)


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_frames_that_a_box_wraps_are_whole(prefix: str) -> None:
    log = "\n".join(f"{prefix}{line}" for line in (*RICH, f"OutOfMemoryError: {SIZE}"))
    (error,) = find_messages(log)
    assert (error.phase, error.trace.place) == ("forward", "cross entropy")
    assert str(error.trace.frame).startswith("torch/nn/functional.py, cross_entropy:")
    assert error.trace.model_type == "llama"


@pytest.mark.parametrize(
    ("head", "last"),
    [
        (
            "File c:\\Users\\me\\site-packages\\torch\\nn\\modules\\module.py:779, in Module._apply(self, fn)",
            "--> 779     x",
        ),
        ("│ C:\\e\\site-packages\\torch\\nn\\modules\\module.py:779 in _apply          │", "│ ❱ 779 │   x │"),
        ('  File "C:\\e\\site-packages\\torch\\nn\\modules\\module.py", line 779, in _apply', "    x"),
    ],
)
def test_frames_of_windows_tell_the_phase(head: str, last: str) -> None:
    (error,) = find_messages(f"Traceback (most recent call last)\n{head}\n{last}\n{SIZE}")
    assert error.phase == "load"


@pytest.mark.parametrize(
    ("file", "function"),
    [("modeling_utils.py", "_load_state_dict_into_meta_model"), ("modeling_utils.py", "_load_state_dict_into_model"),
     ("modeling_utils.py", "_load_pretrained_model"), ("core_model_loading.py", "_materialize_copy")],
)  # fmt: skip
def test_functions_that_load_weights_are_loading(file: str, function: str) -> None:
    log = (
        f'Traceback (most recent call last):\n  File "/e/site-packages/transformers/{file}", line 787, in {function}\n'
    )
    (error,) = find_messages(f"{log}    param = param.to(device)\n{SIZE}")
    assert error.phase == "load"


def test_a_frame_without_its_source_ends_with_the_function() -> None:
    frame = '  File "/e/site-packages/torch/utils/checkpoint.py", line 3, in backward\n'
    (error,) = find_messages(f"Traceback (most recent call last):\n{frame}{SIZE}")
    assert (error.trace.place, error.trace.frame) == ("recomputation", "torch/utils/checkpoint.py, backward")
