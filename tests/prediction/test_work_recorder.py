"""The work of a traced training is recorded: as much as a real one does, and kernels outside the dispatcher."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from hf_memkit.catalog.models import describe
from hf_memkit.prediction import wire
from hf_memkit.prediction.child.libraries import library_rules
from hf_memkit.prediction.child.tracer.work_recorder import NOT_COUNTED
from hf_memkit.prediction.setup_as_script import SetupJob
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.prediction.trace.work import Work
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.setup import Setup
from tests.prediction.architectures import ARCHITECTURES, MIXTURES, of_architecture
from tests.prediction.cases import traced, without_saving
from tests.prediction.test_child_libraries import LENGTH, models, setup_of  # noqa: F401 - a fixture

CHILD: Final = Path(__file__).resolve().parents[2] / "hf_memkit" / "prediction" / "child"

pytestmark = pytest.mark.tracing


def recorded(worker: Worker, setup: Setup, **options: object) -> Work:
    found = traced(worker, SetupJob(without_saving(setup), LENGTH), for_plan=True, **options).work
    assert found is not None
    return found


def flops(work: Work, span: tuple[int, int]) -> Counter[str]:
    """Of a step, by kind of operation."""
    found: Counter[str] = Counter()
    for call in work.calls[slice(*span)]:
        found[work.operations[call].kind] += work.operations[call].flops
    return found


def bytes_of(work: Work, name: str, span: tuple[int, int]) -> list[int]:
    rows = [work.operations[call] for call in work.calls[slice(*span)]]
    return [each.moved_bytes for each in rows if each.name.startswith(name)]


@pytest.mark.slow
def test_fake_steps_compute_what_real_ones_do(worker: Worker, models: dict[str, Path]) -> None:  # noqa: F811
    """Defect: products that are recorded twice, or not at all, on fake tensors."""
    setup = setup_of(models["llama"], "checkpointed").put("model.attn_implementation", "eager", "composed of products")
    fake, real = (recorded(worker, setup, device=device) for device in ("cpu", "real cpu"))
    assert len(fake.steps()) == len(real.steps()) == 2
    first, second = (flops(real, span) for span in real.steps())
    assert first["matmul"] == second["matmul"] > 0
    assert [flops(fake, span)["matmul"] for span in fake.steps()] == [first["matmul"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "convnext", "mixtral"])
def test_every_kind_of_architecture_is_recorded_whole(name: str, worker: Worker) -> None:
    """Defect: an encoder, a convolution or experts whose products have no FLOPs, or others than on a CPU."""
    found = next(each for each in (*ARCHITECTURES, *MIXTURES) if each.name == name)
    fake, real = (
        traced(worker, of_architecture(found, "plain"), device=each, for_plan=True).work
        for each in ("cpu", "real cpu")
    )
    assert fake is not None and real is not None
    assert [flops(fake, span) for span in fake.steps()] == [flops(real, span) for span in real.steps()]
    assert flops(fake, fake.steps()[-1])["matmul"] > 0
    assert not [each.name for each in fake.operations if each.kind == "unknown"]


def test_phases_of_work_are_those_of_memory(worker: Worker, models: dict[str, Path]) -> None:  # noqa: F811
    """Defect: marks for storages only."""
    trace = traced(worker, SetupJob(setup_of(models["llama"], "checkpointed"), LENGTH), for_plan=True)
    assert trace.work is not None
    assert [phase for _, phase in trace.work.marks] == [phase for _, phase in trace.marks]
    assert wire.loads(Trace, wire.dumps(trace)) == trace


def test_the_four_bit_product_dequantises_and_multiplies(worker: Worker, models: dict[str, Path]) -> None:  # noqa: F811
    """Defect: products with 4-bit weights without FLOPs: they are bitsandbytes' operation, not torch's."""
    pytest.importorskip("bitsandbytes")
    work = recorded(worker, setup_of(models["llama"], "qlora"))
    rows = [each for each in work.operations if each.name.startswith("bitsandbytes.gemm_4bit")]
    assert rows and all(each.flops == 2 * each.shape[1] * each.shape[2] * each.shape[3] for each in rows)


@pytest.mark.parametrize("optimizer", [pytest.param("adamw_bnb_8bit", marks=pytest.mark.slow), "paged_adamw_32bit"])
def test_bitsandbytes_optimizers_move_states(optimizer: str, worker: Worker, models: dict[str, Path]) -> None:  # noqa: F811
    """Defect: paged states, which a trace has in RAM, cost nothing; or a step without its operation."""
    pytest.importorskip("bitsandbytes")
    setup = setup_of(models["llama"], "checkpointed").put("arguments.optim", optimizer, "asked")
    model = describe(str(models["llama"]), use_hub=False)
    work = recorded(worker, setup)
    moved = sum(bytes_of(work, "bitsandbytes.optimizer_update", work.steps()[-1]))
    least = 2 * 4 + 2 * (2 if "8bit" in optimizer else 8)  # weights and states, read and written, a parameter
    assert model.parameters * least < moved < model.parameters * (least + 16)


def test_torchaos_compiled_step_has_a_row(worker: Worker, models: dict[str, Path]) -> None:  # noqa: F811
    """Defect: the compiled step, which is replaced, costs nothing."""
    pytest.importorskip("torchao")
    setup = setup_of(models["llama"], "checkpointed").put("arguments.optim", "adamw_torch_8bit", "asked")
    work = recorded(worker, setup)
    found = bytes_of(work, "torchao.single_param_adam", work.steps()[-1])
    assert found and all(found)


def test_liger_kernels_have_rows(worker: Worker, models: dict[str, Path]) -> None:  # noqa: F811
    """Defect: Triton's kernels, which are not launched, cost nothing."""
    if any(importlib.util.find_spec(name) is None for name in ("triton", "liger_kernel")):
        pytest.skip("liger-kernel and triton are not installed")
    work = recorded(worker, setup_of(models["llama"], "checkpointed").put("arguments.use_liger_kernel", True, "asked"))
    rows = {each.name: each for each in work.operations if each.name.startswith("triton.")}
    assert len(rows) >= 4  # norm, activation, rotation, loss
    assert all(each.kind == "memory" and each.moved_bytes for each in rows.values())


KERNELS = """
import triton
import triton.language as tl

@triton.jit
def multiply(a, b):
    return tl.dot(a, b)

@triton.jit
def adds(a, b):
    tl.store(b, tl.load(a) + 1)  # not tl.dot(a, b)

@triton.autotune([triton.Config({})], key=[])
@triton.jit
def attends(a, b):
    tl.store(b, multiply(tl.load(a), tl.load(b)))
"""


def test_a_user_s_kernel_with_products_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: a kernel that computes attention costs what its bytes do, and a setup with it comes first."""
    pytest.importorskip("triton")
    (tmp_path / "users_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernels = importlib.import_module("users_kernels")
    assert not library_rules._multiplies(library_rules._kernel(kernels.adds))
    assert library_rules._multiplies(library_rules._kernel(kernels.attends)), "in a function that it calls"


@pytest.mark.slow
def test_trls_head_has_rows(worker: Worker) -> None:
    """Defect: the kernels of TRL's fused head, which are replaced with nothing, cost nothing."""
    pytest.importorskip("trl")
    found = next(each for each in ARCHITECTURES if each.name == "llama")
    work = traced(worker, of_architecture(found, "sft"), for_plan=True).work
    assert work is not None
    rows = {each.name: each.moved_bytes for each in work.operations if each.name.startswith("triton.")}
    assert rows.keys() == {"triton._forward_kernel", "triton._backward_kernel"} and all(rows.values())


def test_fp16_waits_for_the_scaler(worker: Worker, models: dict[str, Path]) -> None:  # noqa: F811
    """Defect: the host runs ahead of a step that it decides by a value."""
    setup = setup_of(models["llama"], "checkpointed").put("arguments.bf16", False, "asked")
    setup = setup.put("arguments.fp16", True, "asked").put(
        "arguments.optim", "adamw_torch", "asked"
    )  # none of its own
    work = recorded(worker, setup)
    steps = [each for each in work.operations if each.name.startswith("torch.amp")]
    assert len(steps) == 1 and steps[0].waits


# ---- replacements are listed ----

RECORDED: Final = {
    "library_rules.py: kind.run", "sft.py: setattr(kernels, name)", "fake_gpu.py: torch.compile",
    "fake_gpu.py: torch.amp.GradScaler._maybe_opt_step",
    "generation.py: setattr(GenerationMixin, name)", "vllm.py: module.LLM",
    "compiler_patches.py: setattr(private(parent), name)",
    "vllm.py: module.VLLMClient", "library_rules.py: functional.lib",
}  # fmt: skip
"""Replaced, and recorded by `launched` or `repetitions`."""

SEES_DISPATCHER: Final = {
    "compiler_patches.py: guards._empty_strided_cpu", "compiler_patches.py: guards._empty_strided_cuda",
    "compiler_patches.py: guards._reinterpret_tensor", "compiler_patches.py: kind.__call__",
    "attention.py: F.scaled_dot_product_attention", "fake_gpu.py: _CUDA_KERNELS.impl",
    "fake_gpu.py: FakeTensorMode.__torch_dispatch__", "fake_gpu.py: nn.Module._apply",
    "fake_gpu.py: torch.Tensor._make_subclass",
    "flash_attn_package.py: setattr(hub_kernels, name)", "flash_attn_package.py: package.bert_padding",
    "flash_attn_package.py: package.flash_attn_interface", "generation.py: setattr(layer, name)",
    "generation.py: whisper.generate", "library_rules.py: FakeTensor.__deepcopy__",
    "library_rules.py: _Fp32States._new_buffer",
    "library_rules.py: functional.get_paged", "library_rules.py: functional.optimizer_update_32bit",
    "library_rules.py: torch.library.register_fake", "library_rules.py: torch.tensor",
    "library_rules.py: masking_utils.find_packed_sequence_indices", "real_and_fake.py: FakeTensor.data",
    "real_and_fake.py: nn.Parameter.__new__", "real_and_fake.py: nn.init._no_grad_trunc_normal_",
    "phase_hooks.py: setattr(owner, name)", "other_ranks.py: operations._gpu_gather",
}  # fmt: skip
"""Replaced by operations of torch, which the dispatcher sees."""

NO_KERNEL: Final = {
    "adapters.py", "at_train.py", "below_train.py", "checkpoints.py", "constant_propagation.py",
    "describe_training.py", "cuda_device_guard.py", "cuda_queries.py", "evaluations.py", "fast_fakes.py",
    "forks.py", "kept_predictions.py", "file_guards.py", "library_evaluations.py", "loaded_files.py",
    "setup_model.py", "refuse_training_processes.py", "older_libraries.py", "own_loops.py", "plan_facts.py",
    "pretrained.py", "quantised.py", "quick_imports.py", "read_launch.py", "saves.py", "script.py",
    "deepspeed_engine.py", "serve.py", "tracer.py", "output_folder.py", "training_commands.py", "work_recorder.py",
    "fsdp.py", "descendants.py", "sitecustomize.py", "network.py", "trackers.py",
}  # fmt: skip
"""Files that replace questions, files, arguments and Trainer's own methods."""

QUERIES: Final = {
    "compiler_earlier.py: padding._should_pad",
    "compiler_patches.py: mode.__torch_dispatch__", "compiler_patches.py: tuner.autotune_single_field",
    "compiler_speed.py: tx.speculation_log.graph_break_on_requires_grad_",
    "fake_gpu.py: trace_rules.load_object",
    "fake_gpu.py: FakeTensor.numpy", "fake_gpu.py: common.amp_definitely_not_available",
    "fake_gpu.py: fake_tensor.FakeTensorMode.avoid_device_init", "fake_gpu.py: fake_tensor.init_gpu_context",
    "fake_gpu.py: import_utils.is_fake_tensor", "fake_gpu.py: setattr(torch.cuda, name)",
    "fake_gpu.py: torch.inference_mode.__enter__", "fake_gpu.py: torch.inference_mode.__exit__",
    "flash_attn_package.py: setattr(modeling_utils.PreTrainedModel, name)",
    "library_rules.py: training_args.is_torch_tf32_available",
    "other_ranks.py: accelerate.data_loader.synchronize_rng_states",
    "library_rules.py: refs._reshape_view_helper",
    "library_rules.py: tokenizer_utils.fix_untrained_tokens",
    "other_ranks.py: torch.cuda.device_count", "sft.py: kernels.triton", "sft.py: kernels._use_triton",
    "real_and_fake.py: FakeTensor.__format__", "real_and_fake.py: FakeTensor.__repr__",
    "real_and_fake.py: setattr(FakeTensor, name)", "trl_base.py: Trainer.__init__",
    "real_and_fake.py: threading.Thread.run",
    "vllm.py: module.SamplingParams", "vllm.py: module.StructuredOutputsParams",
    "vllm.py: value.is_vllm_available", "preference.py: base._precompute_ref_logps",
    "preference.py: tracer.default", "online.py: trainer._buffered_inputs", "online.py: trainer.lmbda",
    "preference.py: replace_everywhere(utils.hash_module, lambda module: 'predicted')",
    "online.py: replace_everywhere(trl_utils.shuffle_sequence_dict, lambda sequences: sequences)",
}  # fmt: skip
"""Replaced, and no kernel runs."""

BETWEEN_RANKS: Final = {
    "other_ranks.py: dist.init_process_group", "other_ranks.py: operations._gpu_broadcast",
    "other_ranks.py: operations._gpu_gather_object", "other_ranks.py: operations.reduce",
    "other_ranks.py: setattr(dist, name)",
    "other_ranks.py: torch.nn.parallel.DistributedDataParallel",
}  # fmt: skip
"""What ranks send one another is computed elsewhere (`hf_memkit/deepspeed`)."""

OWN: Final = (
    "made.", "other.", "parameter.", "state.", "zeros.", "spec.", "module.__", "setattr(made", "setattr(other",
)  # fmt: skip
"""Attributes of objects that the same function has made."""


def replaced(path: Path) -> Iterator[str]:
    """What a file of `child/` assigns to attributes of others, and the rules that it registers."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and not ast.unparse(each).startswith("self."):
                    yield ast.unparse(each)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("setattr", "replace_everywhere"):
                yield f"{name}({', '.join(map(ast.unparse, node.args[:2]))})"
            elif name.endswith(("register_fake", ".impl")):
                yield name


def test_what_is_replaced_has_a_row_or_a_reason() -> None:
    """Defect: a kernel that a new replacement skips and whose time is not counted. A new replacement in `child/`
    fails here: record it with `work_recorder.launched`, or add it to a list above with the reason."""
    known = RECORDED | SEES_DISPATCHER | QUERIES | BETWEEN_RANKS
    found = {
        f"{path.name}: {name}"
        for path in CHILD.rglob("*.py")
        if path.name not in NO_KERNEL
        for name in replaced(path)
        if not name.startswith(OWN)
    }
    left = {each for each in found - known if each.rpartition(".")[2] not in NOT_COUNTED}
    assert not left
    assert not known - found  # no stale entries


@pytest.mark.parametrize("name", ["library_rules.py", "sft.py", "fake_gpu.py", "vllm.py", "compiler_patches.py"])
def test_what_tells_does_tell(name: str) -> None:
    """Defect: a row that the list above promises, but that is never recorded."""
    assert "launched(" in next(CHILD.rglob(name)).read_text(encoding="utf-8")
