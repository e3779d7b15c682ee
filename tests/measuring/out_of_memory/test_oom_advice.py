"""What is advised, by memory, phase, place and arguments: keys in their order, numbers, and what must not appear."""

from __future__ import annotations

from typing import Any

import pytest

from hf_memkit.measuring.out_of_memory import Explanation, explain_oom, explain_records, judge
from tests.measuring.out_of_memory.oom_messages import EXAMPLES
from tests.measuring.out_of_memory.tracebacks import PLAIN

TOP = "Traceback (most recent call last):\n"


def frame(file: str, function: str, source: str = "x") -> str:
    return f'  File "/e/site-packages/{file}", line 10, in {function}\n    {source}\n'


def gpu(
    requested: str = "448.00 MiB", free: str = "120.00 MiB", allocated: str = "23.05 GiB", total: str = "23.64 GiB",
    cached: str = "1.00 MiB", process: str = "23.50 GiB", device: str = "CUDA", more: str = "",
) -> str:  # fmt: skip
    return (
        f"torch.OutOfMemoryError: {device} out of memory. Tried to allocate {requested}. GPU 0 has a total capacity "
        f"of {total} of which {free} is free. {more}Including non-PyTorch memory, this process has {process} memory "
        f"in use. Of the allocated memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch "
        "but unallocated."
    )


RAM = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
)


def explanation_of(text: str, arguments: dict[str, Any] | None = None) -> Explanation:
    explanation = explain_oom(text, arguments)
    assert explanation.error is not None and explanation.verdict is not None
    return explanation


def keys(explanation: Explanation) -> list[str]:
    """The last word of each change's key, in order."""
    return [change.key.rpartition(".")[2] for change in explanation.changes]


def cause(explanation: Explanation) -> str:
    assert explanation.verdict is not None
    return explanation.verdict.cause


CPU_ADAM = TOP + frame("deepspeed/ops/adam/cpu_adam.py", "step", "state['exp_avg'] = torch.zeros_like(p.data)") + RAM
FROM_PRETRAINED = TOP + frame("transformers/modeling_utils.py", "from_pretrained")
PREDICTIONS = (
    TOP
    + frame("transformers/trainer.py", "evaluation_loop", "all_preds.add(logits)")
    + frame("transformers/trainer_pt_utils.py", "nested_concat", "x")
)
ARRAY = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 59.6 GiB for an array with shape (4000, 512)"
SHARDS = "Loading checkpoint shards:  33%|███        | 1/3 [00:14<00:28, 14.31s/it]\n"
MAP = "Map (num_proc=512):  33%|███        | 1/3 [00:14<00:28, 14.31s/it]\n"
ENDED = "{'train_runtime': 12.3, 'train_loss': 1.2, 'epoch': 3.0}\n100%|██████████| 500/500 [00:30<00:00, 16.1it/s]\n"
SAVE = "Saving model checkpoint to out/checkpoint-500\n"


def test_map_processes_start_from_the_number_in_the_arguments() -> None:
    for name in ("preprocessing_num_workers", "dataset_num_proc", "dataset_processes"):
        first = explanation_of(MAP + "Killed", {name: 512}).changes[0]
        assert (first.key, first.current, first.value) == (f"arguments.{name}", 512, 8)
    assert explanation_of(MAP + "Killed", {"dataset_num_proc": 6}).changes[0].value == 3


@pytest.mark.parametrize("cgroup", ["slurmstepd: error: Detected 1 oom_kill event in StepId=8.0.", "OOMKilled"])
def test_the_limit_of_a_job_is_named_once(cgroup: str) -> None:
    explanation = explanation_of(cgroup)
    assert explanation.verdict is not None and len(explanation.verdict.settings) == 1
    assert "command" not in keys(explanation)


MOVED = (
    TOP
    + frame("accelerate/accelerator.py", "prepare_model", "model = model.to(self.device)")
    + frame("torch/nn/modules/module.py", "_apply", "param_applied = fn(param)")
    + frame("torch/nn/modules/module.py", "convert", "return t.to(")
)
QUANTIZED = TOP + frame("bitsandbytes/nn/modules.py", "to", "return self._quantize(device)")
DISPATCHED = TOP + frame("accelerate/utils/modeling.py", "set_module_tensor_to_device", "value.to(device)")
OFF_GPU = "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit"
BEST = TOP + frame("transformers/trainer.py", "_load_best_model")
LOADS_STATES = (
    TOP
    + frame("transformers/trainer.py", "_load_optimizer_and_scheduler", "self.optimizer.load_state_dict(")
    + frame("torch/optim/optimizer.py", "load_state_dict", "state = self._process_value_according_to_param_policy(")
)
ADAM_STEP = TOP + frame("torch/optim/adamw.py", "_init_group", 'state["exp_avg"] = torch.zeros_like(p)')
VLLM_CACHE = (
    TOP
    + frame("trl/trainer/grpo_trainer.py", "__init__", "self.llm = LLM(")
    + frame("vllm/worker/cache_engine.py", "_allocate_kv_cache", "layer_kv_cache = torch.zeros(alloc_shape,")
)
WAKES = "RuntimeError: CUDA Error: out of memory at /x/cumem_allocator.cpp:62"
VLLM = ["vllm_gpu_memory_utilization", "vllm_mode", "vllm_tensor_parallel_size"]
TAIL = frame("transformers/trainer_pt_utils.py", "torch_pad_and_concatenate", "tensor1.new_full(new_shape, x)")
FULL_DISK = "OSError: [Errno 28] No space left on device"
FULL_SHM = "RuntimeError: unable to write to file </torch_18692_1>: No space left on device (28)"
LOW = "The node was low on resource: "
UNSLOTH = frame("unsloth_zoo/gradient_checkpointing.py", "forward", 'hidden_states.to("cpu", non_blocking=True)')
ZERO_PINS = frame(
    "deepspeed/runtime/zero/stage_1_and_2.py", "__init__", "get_accelerator().pin_memory(torch.zeros(n))"
)
LOADER_PINS = frame("torch/utils/data/_utils/pin_memory.py", "pin_memory", "return data.pin_memory(device)")
RAW = "RuntimeError: CUDA error: out of memory"
ASKED = "RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate {} bytes."


@pytest.mark.parametrize(
    ("text", "arguments", "phase", "expected"),
    [
        # RAM, by place, phase and arguments
        (CPU_ADAM, None, None, ["deepspeed", "LoraConfig", "command"]),
        (CPU_ADAM, {"use_peft": True}, None, ["deepspeed", "command"]),
        (FROM_PRETRAINED + RAM, None, "load", ["dtype", "device_map", "fsdp_config", "command"]),
        (FROM_PRETRAINED + RAM, {"deepspeed": "zero2.json"}, "load", ["dtype", "deepspeed", "command"]),
        (FROM_PRETRAINED + RAM, {"fsdp": "full_shard", "dtype": "bfloat16"}, "load", ["fsdp_config", "command"]),
        (SHARDS + "Killed", {"dataloader_num_workers": 0}, "load", ["dtype", "device_map", "fsdp_config", "command"]),
        (MAP + "Killed", {"dataset_num_proc": 512}, "data",
         ["dataset_num_proc", "writer_batch_size", "streaming", "command"]),
        (SAVE + "Killed", None, "save", ["save_only_model", "command"]),
        (PREDICTIONS + ARRAY, None, "evaluate",
         ["preprocess_logits_for_metrics", "batch_eval_metrics", "prediction_loss_only", "command"]),
        (PREDICTIONS + ARRAY, {"batch_eval_metrics": True}, "evaluate",
         ["preprocess_logits_for_metrics", "prediction_loss_only", "command"]),
        (ENDED + "Killed", {"dataloader_num_workers": 8}, "after",
         ["from_pretrained", "preprocess_logits_for_metrics", "command"]),
        (ENDED + "Killed", {"fsdp": "full_shard", "prediction_loss_only": True}, "after",
         ["from_pretrained", "fsdp_config", "command"]),
        ("Killed", None, None, ["dataloader_num_workers", "deepspeed", "command"]),
        ("Killed", {"dataloader_num_workers": 0}, None, ["command"]),
        ("Killed", {"dataloader_num_workers": 8}, None, ["dataloader_num_workers", "command"]),
        ("Killed", {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}}, None,
         ["deepspeed", "dataloader_num_workers", "command"]),
        (PLAIN + RAM, None, "forward",
         ["per_device_train_batch_size", "activation_checkpointing", "max_length", "command"]),
        # Workers do not shrink one array that is too large.
        (ASKED.format(2**38), None, None, ["deepspeed", "command"]),
        (LOW + "memory. Container x was using 57671680Ki, request is 16Gi.", None, None,
         ["dataloader_num_workers", "deepspeed"]),  # a pod that was evicted gets no larger limit
        ("c++: fatal error: Killed signal terminated program cc1plus", None, None, []),  # no training
        # weights that do not fit
        (MOVED + gpu(), None, "load", ["dtype", "quantization_config", "deepspeed"]),
        (MOVED + gpu(), {"torch_dtype": "bfloat16"}, "load", ["quantization_config", "deepspeed", "command"]),
        (DISPATCHED + gpu(), {"bf16": True, "finetuning_type": "full"}, "load",
         ["quantization_config", "deepspeed", "command"]),
        (DISPATCHED + gpu(), {"bf16": "auto", "base_model": "m"}, "load",
         ["quantization_config", "deepspeed", "command"]),
        (QUANTIZED + gpu(), {"load_in_4bit": True}, "load", ["device_map", "command", "name"]),
        (QUANTIZED + gpu(), {"quantization_bit": 8}, "load", ["quantization_config", "device_map", "command"]),
        (MOVED + gpu(), {"dtype": "bfloat16", "deepspeed": {"zero_optimization": {"stage": 3}}}, "load",
         ["quantization_config", "deepspeed", "command"]),
        (MOVED + gpu(), {"dtype": "bfloat16", "fsdp": ["full_shard", "auto_wrap"]}, "load",
         ["quantization_config", "fsdp_config", "command"]),
        (MOVED + gpu(device="NPU"), {"dtype": "bfloat16"}, "load", ["deepspeed", "command", "name"]),  # without bnb
        (OFF_GPU, None, "load", ["quantization_config", "command", "device_map"]),
        (OFF_GPU, {"load_in_4bit": True}, "load", ["command", "device_map", "name"]),
        # A resume keeps its optimizer and engine; the best model after training.
        (LOADS_STATES + gpu(), {"optim": "adamw_torch"}, "resume", ["command", "from_pretrained"]),
        (BEST + gpu(), None, "best_model", ["load_best_model_at_end"]),
        # No batch sizes what vLLM holds.
        (VLLM_CACHE + gpu(), None, None, VLLM),
        (VLLM_CACHE + WAKES, None, None, VLLM),
        (VLLM_CACHE + gpu(), {"vllm_mode": "server"}, None, VLLM[::2]),
        # The tail of an evaluation is known by its innermost frame: kept predictions grow, and are no fragmentation.
        (TAIL + gpu("12.94 GiB", "12.29 GiB", "18.33 GiB", "39.56 GiB", "7.38 GiB", "26.00 GiB"), None, "evaluate",
         ["preprocess_logits_for_metrics", "eval_accumulation_steps", "batch_eval_metrics"]),
        # page-locked RAM, by who locks it
        (UNSLOTH + RAW, None, "forward", ["use_gradient_checkpointing", "command", "dataloader_pin_memory"]),
        (ZERO_PINS + RAW, None, None, ["pin_memory", "command", "dataloader_pin_memory"]),
        (LOADER_PINS + RAW, None, None, ["dataloader_pin_memory", "pin_memory", "command"]),
        # shared memory and disks
        (FULL_SHM, None, None, ["dataloader_num_workers"]), (FULL_SHM, {"dataloader_num_workers": 0}, None, []),
        (FULL_DISK, {"save_total_limit": 1, "save_only_model": True}, None, ["HF_HOME"]),
        ("Running tokenizer on dataset:  3%|  | 1/9\n" + FULL_DISK, None, "data", ["HF_HOME"]),
        *((TOP + frame(file, function) + FULL_DISK, None, phase, ["HF_HOME"]) for file, function, phase in (
            ("datasets/arrow_writer.py", "write_table", "data"), ("datasets/arrow_dataset.py", "_map_single", "data"),
            ("huggingface_hub/file_download.py", "http_get", "load"),
        )),
    ],
)  # fmt: skip
def test_changes_by_memory_place_phase_and_arguments(
    text: str, arguments: dict[str, Any] | None, phase: str | None, expected: list[str]
) -> None:
    explanation = explanation_of(text, arguments)
    assert explanation.error is not None and explanation.verdict is not None
    assert (explanation.error.phase, keys(explanation)) == (phase, expected)
    memory, verdict = explanation.error.message.memory, explanation.verdict
    expected_cause = {"host": "host memory", "pinned": "host memory", "device": "size"}.get(memory, memory)
    assert verdict.cause == ("cap" if text.endswith(WAKES) else expected_cause)
    if memory == "host":
        assert not any("eval_accumulation_steps" in one.key for one in (*verdict.settings, *explanation.changes))


def test_a_resume_keeps_its_optimizer_and_engine() -> None:
    for text in (LOADS_STATES + gpu(), ADAM_STEP + gpu(), gpu()):
        resumed = keys(explanation_of(text, {"resume_from_checkpoint": "out/checkpoint-5"}))
        assert resumed and not {"optim", "deepspeed", "LoraConfig"} & {*resumed}


@pytest.mark.parametrize(
    ("requested", "free", "expected"),
    [("4.44 GiB", "4.44 GiB", "size"), ("4.44 GiB", "4.45 GiB", "size"), ("2.00 MiB", "2.69 MiB", "size"),
     ("20.00 MiB", "2.00 GiB", "unknown")],
)  # fmt: skip
def test_a_gpu_with_next_to_nothing_left_is_full(requested: str, free: str, expected: str) -> None:
    text = gpu(requested, free, "5.77 GiB", "10.58 GiB", "178.42 MiB", "6.14 GiB")
    if free == "2.69 MiB":
        text = gpu(requested, free, "10.20 GiB", "10.58 GiB", "178.42 MiB", "10.57 GiB")
    explanation = explanation_of(text)
    assert cause(explanation) == expected and explanation.changes
    assert keys(explanation_of(PREDICTIONS + text))[0] == "preprocess_logits_for_metrics"


@pytest.mark.parametrize("process", ["0 bytes", "512.00 MiB"])
def test_a_process_smaller_than_what_it_reserved_is_of_unknown_size(process: str) -> None:
    explanation = explanation_of(gpu("2.63 GiB", "2.61 GiB", "48.15 GiB", "79.11 GiB", "3.49 GiB", process))
    assert explanation.verdict is not None and cause(explanation) == "another process"
    figures = explanation.verdict.figures
    assert figures["outside_allocator_gib"] == pytest.approx(24.86, abs=0.01)
    assert "other_processes_gib" not in figures and explanation.changes
    assert "24.86 GiB" in explanation.verdict.why and "76.5" not in explanation.verdict.why


def test_libraries_that_hold_much_are_named_before_ncclss_buffers() -> None:
    def fixes(process: str, allocated: str) -> list[str]:
        explanation = explanation_of(gpu("3.63 GiB", "1.61 GiB", allocated, "79.11 GiB", "1.49 GiB", process))
        assert (
            explanation.verdict is not None and cause(explanation) == "context and libraries" and explanation.changes
        )
        return [one.key for one in explanation.verdict.settings]

    assert fixes("77.40 GiB", "51.15 GiB")[0] == "vLLM gpu_memory_utilization"
    assert "environment.NCCL_BUFFSIZE" not in fixes("77.40 GiB", "51.15 GiB")
    arguments = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5, "per_device_train_batch_size": 1}
    explanation = explanation_of(
        gpu("2.63 GiB", "1.61 GiB", "51.15 GiB", "79.11 GiB", "1.49 GiB", "77.40 GiB"), arguments
    )
    assert explanation.changes[0].current == 0.5 and keys(explanation)[0] == "vllm_gpu_memory_utilization"


def test_kept_predictions_grow_and_are_no_fragmentation() -> None:
    text = gpu("2.00 GiB", allocated="18.05 GiB", cached="4.90 GiB")
    assert cause(explanation_of(text)) == "fragmentation"
    explanation = explanation_of(PREDICTIONS + text)
    assert cause(explanation) == "size" and explanation.verdict is not None and not explanation.verdict.settings
    assert keys(explanation) == ["preprocess_logits_for_metrics", "eval_accumulation_steps", "batch_eval_metrics"]


ASSERTION = "../aten/src/ATen/native/cuda/{}: block: [0,0,0], thread: [0,0,0] Assertion `{}` failed.\n"


@pytest.mark.parametrize(
    ("file", "assertion", "fix"),
    [("Indexing.cu:1284: indexSelectLargeIndex", "srcIndex < srcSelectDimSize", "model.resize_token_embeddings"),
     ("Loss.cu:242: nll_loss_forward_reduce_cuda_kernel_2d", "t >= 0 && t < n_classes", "num_labels")],
)  # fmt: skip
@pytest.mark.parametrize(
    "error",
    [
        "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUBLAS_STATUS_NOT_INITIALIZED",
        "out of memory",
    ],
)
def test_an_index_out_of_range_is_not_memory(file: str, assertion: str, fix: str, error: str) -> None:
    explanation = explanation_of(f"{ASSERTION.format(file, assertion)}RuntimeError: CUDA error: {error}")
    assert explanation.verdict is not None and cause(explanation) == "index out of range"
    assert explanation.verdict.settings[0].key == fix and not explanation.changes and not explanation.next_steps
    assert cause(explanation_of(f"RuntimeError: CUDA error: {error}")) == "context and libraries"
    assert cause(explanation_of(ASSERTION.format(file, assertion) + gpu())) == "size", "torch's own message has sizes"


OLD_NPU = (
    "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 32.00 GiB total capacity; 20.40 GiB already allocated; "
    "1.00 GiB free; 30.42 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (gpu(device="HIP", allocated="6.97 GiB", process="7.62 GiB", more="Process 7 has 15.00 GiB memory in use. "),
         ["rocm-smi", "HIP_VISIBLE_DEVICES", "PYTORCH_HIP_ALLOC_CONF"]),
        (gpu(device="NPU", allocated="6.97 GiB", process="7.62 GiB", more="Process 7 has 15.00 GiB memory in use. "),
         ["npu-smi", "ASCEND_RT_VISIBLE_DEVICES", "PYTORCH_NPU_ALLOC_CONF"]),
        (gpu(device="XPU", allocated="6.97 GiB", process="7.62 GiB", more="Process 7 has 15.00 GiB memory in use. "),
         ["xpu-smi", "ZE_AFFINITY_MASK"]),
        (OLD_NPU, ["PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"]),
        ("RuntimeError: HIP error: out of memory", ["rocm-smi"]),
        ("RuntimeError: CUDA error: out of memory\nSearch for `hipErrorOutOfMemory' in https://docs.nvidia.com/x",
         ["rocm-smi"]),
        ("RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
         ["torch.xpu.set_per_process_memory_fraction"]),
        ("RuntimeError: FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::268435456 (256)MB", []),
    ],
)  # fmt: skip
def test_tools_are_those_of_the_device(text: str, names: list[str]) -> None:
    explanation = explanation_of(text)
    printed = explanation.text()
    assert all(name in printed for name in names), printed
    strange = ["nvidia-smi", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "memkit plan"]
    strange += [] if explanation.error.message.device_type == "rocm" else ["torch.cuda.", "bnb_8bit"]  # type: ignore
    assert not [word for word in strange if word in printed]
    assert explanation.error is not None and explanation.error.count == 1 and not explanation.others


BACKWARD = TOP + frame("torch/autograd/graph.py", "_engine_run_backward")
JOB = {"per_device_train_batch_size": 8, "max_length": 2048, "model_name_or_path": "meta-llama/Llama-3.2-1B"}


@pytest.mark.parametrize(
    ("requested", "arguments", "place", "first"),
    [
        ("7.83 GiB", JOB, "logits", "use_liger_kernel"),  # 8 · 2048 · 128256 · 4
        ("3.91 GiB", JOB, "logits", "use_liger_kernel"),  # in 16 bit
        ("8.00 GiB", {**JOB, "max_length": 4096, "per_device_train_batch_size": 4}, "attention",
         "attn_implementation"),
        ("7.83 GiB", {"micro_batch_size": 8, "sequence_len": 2048, "base_model": "meta-llama/Llama-3.2-1B"}, "logits",
         "use_liger_kernel"),
        ("7.83 GiB", {**JOB, "use_liger_kernel": True, "trl": 1}, "logits", "per_device_train_batch_size"),
        ("7.83 GiB", {**JOB, "per_device_train_batch_size": 4}, None, "per_device_train_batch_size"),
        ("7.83 GiB", None, None, "per_device_train_batch_size"),
    ],
)  # fmt: skip
def test_a_request_of_the_size_of_logits_or_scores_is_known(
    requested: str, arguments: dict[str, Any] | None, place: str | None, first: str
) -> None:
    explanation = explanation_of(BACKWARD + gpu(requested, allocated="13.05 GiB", total="15.64 GiB"), arguments)
    assert explanation.error is not None and explanation.error.trace.place == place
    assert keys(explanation)[0] == first
    if place is None:
        assert "use_liger_kernel" in keys(explanation), "a request of several GiB"


@pytest.mark.parametrize("name", ["vLLM, too small a cache", "JAX, now", "NCCL, 2.18 and before"])
def test_a_cache_a_program_and_a_buffer_are_not_called_logits(name: str) -> None:
    text = next(example.text for example in EXAMPLES if example.name == name)
    explanation = explanation_of(text, {**JOB, "max_length": 4096, "per_device_train_batch_size": 8})
    assert explanation.error is not None and explanation.error.trace.place is None
    assert explanation.verdict is not None and explanation.verdict.why == judge(explanation.error.message).why
    assert "use_liger_kernel" not in keys(explanation)


def test_a_tiny_request_fails_at_a_limit_of_the_process() -> None:
    text = "RuntimeError: unable to mmap {} bytes from file </torch_41_3>: Cannot allocate memory (12)"
    verdict = explanation_of(text.format(1224)).verdict
    assert verdict is not None and verdict.cause == "host memory"
    assert [one.value.partition("=")[0] for one in verdict.settings] == [
        "sudo sysctl -w vm.max_map_count",
        "ulimit -v unlimited",
    ]
    assert keys(explanation_of(text.format(1224)))[0] == "dataloader_num_workers", "whose tensors are memory maps"
    assert explanation_of(text.format(2**30)).verdict.settings == ()  # type: ignore[union-attr]
    assert explanation_of("/Users/me/train.py:3: UserWarning\n" + text.format(1224)).verdict.settings == ()  # type: ignore[union-attr]


def test_a_known_place_is_not_called_logits() -> None:
    explanation = explanation_of(ADAM_STEP + gpu("7.83 GiB"), JOB)
    assert explanation.error is not None and explanation.error.trace.place == "optimizer states"
    assert explanation_of(PLAIN + gpu("7.70 GiB"), JOB).error.trace.place is None  # type: ignore[union-attr]


def test_records_get_the_same_advice_for_ram() -> None:
    run: dict[str, Any] = {"versions": {"torch": "2.13.0"}, "hardware": {"device_type": "cuda"},
                           "arguments": {"dataloader_num_workers": 8, "per_device_train_batch_size": 8}}  # fmt: skip
    for phase, expected in (
        ("data", ["dataloader_num_workers", "command"]),
        ("evaluate", ["preprocess_logits_for_metrics", "batch_eval_metrics", "prediction_loss_only",
                      "dataloader_num_workers"]),
        ("save", ["save_only_model", "command"]),
    ):  # fmt: skip
        assert keys(explain_records(run, {"phase": phase, "step": 3, "error": RAM})) == expected
    offloaded = {**run, "engine": "DeepSpeedEngine", "optimizer_classes": ["DeepSpeedCPUAdam"]}
    assert keys(explain_records(offloaded, {"phase": "backward", "step": 3, "error": RAM}))[0] == "deepspeed"
    full = {"phase": "backward", "step": 3, "error": gpu("1.24 GiB", allocated="10.34 GiB", cached="3.87 GiB")}
    settings = explain_records(run, full).verdict.settings  # type: ignore[union-attr]
    assert settings[0].key == "environment.PYTORCH_ALLOC_CONF", "the name that torch 2.9 and later have"


MANAGED = "Error out of memory at line 380 in file /build/bitsandbytes/csrc/pythonInterface.c"
PAGED = TOP + frame("bitsandbytes/functional.py", "get_paged", "out = torch.from_numpy(ctypes.pointer(")
OLDER_MANAGED = PAGED + "Error out of memory at line 119 in file /build/csrc/ops.cu"


@pytest.mark.parametrize(
    ("text", "optim", "value"),
    [(MANAGED, "paged_adamw_32bit", "adamw_torch"), (MANAGED, "paged_adamw_8bit", "adamw_bnb_8bit"),
     (MANAGED, None, "adamw_bnb_8bit"), (OLDER_MANAGED, "paged_lion_8bit", "lion_8bit")],
)  # fmt: skip
def test_managed_memory_of_a_paged_optimizer(text: str, optim: str | None, value: str) -> None:
    explanation = explanation_of(text, {"optim": optim} if optim else None)
    assert cause(explanation) == "host memory"
    first = explanation.changes[0]
    assert (first.key, first.current, first.value) == ("arguments.optim", optim, value)
    assert "per_device_train_batch_size" not in keys(explanation)


@pytest.mark.parametrize(
    "warns",
    [
        "/e/torch/distributed/fsdp/_state_dict_utils.py:312: UserWarning: Failed to clone() tensor with name x. ",
        "/e/torch/distributed/fsdp/fully_sharded_data_parallel.py:2224: UserWarning: Failed to clone() tensor x. ",
        "UserWarning: Failed to clone() tensor with name x. ",
        "layers.39.weight on rank 1. This may mean x if this parameter is managed by FSDP. Please check x. ",
    ],
)  # fmt: skip
def test_a_warning_of_fsdp_is_a_save(warns: str) -> None:
    warned = (
        f"{warns}Error: CUDA out of memory. Tried to allocate 172.00 MiB (GPU 0; 47.54 GiB total capacity; 45.40 GiB "
        "already allocated; 25.62 MiB free; 46.42 GiB reserved in total by PyTorch)"
    )
    explanation = explanation_of(warned)
    assert explanation.error is not None and explanation.error.phase == "save" and not explanation.next_steps
    trace = explanation.error.trace
    assert (trace.place, trace.library, "FSDP" in trace.in_use) == ("gathered weights", "FSDP", True)
    assert explanation.changes[0].value == {"state_dict_type": "SHARDED_STATE_DICT"}


def test_what_vllm_splits_and_what_generates() -> None:
    split = explanation_of(VLLM_CACHE + gpu(), {"vllm_tensor_parallel_size": 2}).changes[2]
    assert (split.current, split.value) == (2, 4)
    generates = TOP + frame("transformers/generation/utils.py", "_sample", "outputs = self(**model_inputs)")
    assert keys(explanation_of(generates + gpu()))[0] == "per_device_eval_batch_size"


TOWER = (
    TOP
    + frame("transformers/trainer.py", "training_step", "loss = self.compute_loss(model, inputs)")
    + frame("transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py", "forward", "x = self.visual(pixel_values, grid)")
    + frame("transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py", "forward", "F.scaled_dot_product_attention(q, k)")
)


@pytest.mark.parametrize(
    ("arguments", "key", "current", "value"),
    [(None, "processor.max_pixels", None, "half"), ({"max_pixels": 602112}, "arguments.max_pixels", 602112, 301056),
     ({"image_max_pixels": 262144}, "arguments.image_max_pixels", 262144, 131072)],
)  # fmt: skip
def test_shorter_texts_do_not_help_a_vision_tower(
    arguments: dict[str, Any] | None, key: str, current: int | None, value: object
) -> None:
    explanation = explanation_of(TOWER + gpu("34.83 GiB", total="44.55 GiB", allocated="20.90 GiB"), arguments)
    last = explanation.changes[-1]
    assert (last.key, last.current, last.value) == (key, current, value)
    assert keys(explanation)[0] == "attn_implementation" and "max_length" not in keys(explanation)


def test_settings_of_what_a_cluster_or_a_compiler_killed() -> None:
    for text, setting in (
        (LOW + "memory. Container x was using 57671680Ki, request is 16Gi.", "resources.requests.memory"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "environment.MAX_JOBS"),
    ):
        verdict = explanation_of(text).verdict
        assert verdict is not None and [one.key for one in verdict.settings] == [setting]
    explanation = explanation_of(LOW + "ephemeral-storage.")
    assert cause(explanation) == "disk" and keys(explanation)[0] == "save_total_limit"


def test_of_two_messages_of_a_form_the_one_with_the_size_is_explained() -> None:
    log = (
        "n1:1:2 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n\n"
        "n1:1:2 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes\n"
    )
    error = explanation_of(log).error
    assert error is not None and error.message.requested_bytes == 6291456


def test_one_large_allocation_on_an_intel_gpu() -> None:
    text = (
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 15.11 "
        "GiB. Of the allocated memory {} GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated."
    )
    explanation = explanation_of(text.format("4.00", "1.00"))
    assert explanation.verdict is not None and cause(explanation) == "cap"
    assert [one.key for one in explanation.verdict.settings] == ["environment.UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS"]
    assert cause(explanation_of(text.format("4.00", "12.00"))) == "size", (
        "more than the GPU has, with what is reserved"
    )
    assert cause(explanation_of(text.format("3.00", "1.00"))) == "unknown"


def test_what_a_notebook_prints_twice_is_explained_by_its_frames() -> None:
    stack = 'File ~/e/unsloth_zoo/x.py:147, in X.forward(ctx)\n--> 147     x.to("cpu", non_blocking = True)\n'
    error = "RuntimeError: CUDA error: out of memory\n"
    explanation = explanation_of(f'"message": "CUDA error: out of memory\n"stack": "{TOP}{stack}{error}')
    assert explanation.error is not None and explanation.error.message.memory == "pinned"


def test_contexts_of_other_ranks_are_told_from_other_jobs() -> None:
    def first(*sizes: str) -> str | None:
        more = "".join(f"Process {number} has {size} memory in use. " for number, size in enumerate(sizes, 100))
        verdict = explanation_of(
            gpu("2.00 MiB", "1.06 MiB", "75.90 GiB", "79.15 GiB", "101.20 MiB", "77.05 GiB", more=more)
        ).verdict
        assert verdict is not None
        return verdict.settings[0].key if verdict.settings else None

    assert first("4.00 MiB", "510.00 MiB", "512.00 MiB") == "torch.cuda.set_device"
    assert first("510.00 MiB") is None and first("4.00 MiB", "4.00 MiB") is None
    assert first("11.00 GiB", "11.00 GiB") != "torch.cuda.set_device"
