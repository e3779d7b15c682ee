"""Proofs about offloading to the CPU and to NVMe. On disk nothing below a megabyte is swapped: the wide model."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_memkit.checks.rules.offload import ADAM_BUFFERS, PIPELINED_BUFFERS
from tests.checks.case import CPU, ZERO
from tests.checks.configs import ds
from tests.checks.real import files, optimizers, parse, reads, refused, train, trainer
from tests.checks.registry import proof


def _nvme(optimizer: dict[str, Any] | None, parameters: dict[str, Any] | None = None) -> tuple[dict[str, Any], Path]:
    """A config that swaps to a new folder, in sub-groups that are large enough to be swapped."""
    folder = Path(tempfile.mkdtemp())
    changes: dict[str, Any] = {f"{ZERO}.sub_group_size": 400_000}
    for name, values in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if values is not None:
            changes[f"{ZERO}.{name}"] = {"device": "nvme", "nvme_path": str(folder), **values}
    return ds(3, changes), folder


def _swap(optimizer: dict[str, Any] | None, parameters: dict[str, Any] | None = None, **more: Any) -> Path:
    config, folder = _nvme(optimizer, parameters)
    train(config, wide=True, **more)
    return folder


@proof("nvme-below-stage-3", fails="silent")
def nvme_below_stage_3() -> None:
    folder = Path(tempfile.mkdtemp())
    engine = train(ds(2, {f"{ZERO}.offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}), wide=True)
    assert optimizers(engine)[1] == "DeepSpeedCPUAdam" and not files(folder)


@proof("param-offload-below-stage-3", fails="silent")
def param_offload_below_stage_3() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert "offload_param_config" not in inspect.signature(DeepSpeedZeroOptimizer.__init__).parameters
    done = train(ds(2, {f"{ZERO}.offload_param": {"device": "cpu"}}))
    assert optimizers(done) == ("DeepSpeedZeroOptimizer", "AdamW")


@proof("offload-at-stage-0", fails="silent")
def offload_at_stage_0() -> None:
    assert optimizers(train(ds(0, CPU)))[1] == "DeepSpeedCPUAdam"


@proof("nvme-key-without-nvme", fails="silent")
def nvme_key_without_nvme() -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stage12

    folder = Path(tempfile.mkdtemp())
    section = {"device": "cpu", "nvme_path": str(folder), "buffer_count": 1, "pipeline_read": True}
    train(ds(3, {f"{ZERO}.offload_optimizer": section}), wide=True)
    assert not files(folder)
    for name in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "fast_init"):
        assert reads(Stage12, name) == 0, name
    assert reads(Stage3._configure_tensor_swapping, "nvme_path") == 1


@proof("ratio-no-effect", fails="silent")
def ratio_no_effect() -> None:
    """Two sub-groups, one for each of Trainer's parameter groups: of a share of 0.6 nothing stays on the GPU."""
    for ratio, kept in ((0.6, 0), (0.5, 1)):
        section = {f"{ZERO}.offload_optimizer": {"device": "cpu", "ratio": ratio}}
        optimizer = train(ds(3, section)).model_wrapped.optimizer
        count = len(optimizer.fp16_partitioned_groups_flat)
        assert count == 2 and int((1 - optimizer.partial_offload) * count) == kept
    assert reads(type(optimizer)._create_fp32_partitions, "int((1 - self.partial_offload) * sub_group_size)") == 1


@proof("super-offload-unsupported", fails="silent")
def super_offload_unsupported() -> None:
    section = {f"{ZERO}.offload_optimizer": {"device": "cpu", "super_offload": True}}
    refused("SuperOffload only supports NVIDIA CUDA GPUs", lambda: train(ds(3, section)))
    assert optimizers(train(ds(2, section)))[0] == "DeepSpeedZeroOptimizer"


@proof("cores-without-super-offload", fails="unshown")
def cores_without_super_offload() -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    assert reads(Stage3, "cpuadam_cores_perc") == 1  # its own parameter, which it does nothing with


@proof("nvme-path-missing", fails="late")
def nvme_path_missing() -> None:
    refused("NoneType", lambda: train(ds(3, {f"{ZERO}.offload_optimizer": {"device": "nvme"}}), wide=True))


@proof("nvme-path-unusable", fails="late")
def nvme_path_unusable() -> None:
    path = Path(tempfile.mkdtemp()) / "file"
    path.write_text("")
    section = {f"{ZERO}.offload_optimizer": {"device": "nvme", "nvme_path": str(path)}}
    refused("NotADirectoryError", lambda: train(ds(3, section), wide=True))


@proof("aio-without-nvme", fails="unshown")
def aio_without_nvme() -> None:
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    assert reads(stage_1_and_2, "aio") == 0
    assert reads(stage3.DeepSpeedZeroOptimizer_Stage3.__init__, "self._configure_tensor_swapping(") == 1
    assert parse(ds(2, {"aio": {"block_size": 4}})).aio_config["block_size"] == 4


@proof("buffers-too-few", fails="late")
def buffers_too_few() -> None:
    refused("AssertionError", lambda: _swap({"buffer_count": ADAM_BUFFERS - 1}, max_steps=2))
    assert files(_swap({"buffer_count": ADAM_BUFFERS}, max_steps=2))


@proof("pipelined-buffers-too-few", fails="late")
def pipelined_buffers_too_few() -> None:
    for (read, write), enough in PIPELINED_BUFFERS.items():
        pipes = {"pipeline_read": read, "pipeline_write": write}
        refused("ran out of swap buffers", lambda: _swap({**pipes, "buffer_count": enough - 1}, max_steps=3))  # noqa: B023
        assert files(_swap({**pipes, "buffer_count": enough}, max_steps=3))


@proof("fast-init-no-effect", fails="silent")
def fast_init_no_effect() -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    source = inspect.getsource(Stage3._create_fp32_partitions)
    branch = source.index("if self.params_in_nvme_and_cpu and tensor is None:")
    assert source.count("offload_optimizer_fast_init") == 1 and source.index("offload_optimizer_fast_init") > branch
    assert files(_swap({"fast_init": True}))


@proof("buffer-too-small", fails="late")
def buffer_too_small() -> None:
    """The largest parameter has 2048 × 256 elements."""
    small = {"buffer_size": 2048 * 256 - 1, "max_in_cpu": 0}
    refused("More elements 524288 than buffer size", lambda: _swap(None, small))
    assert files(_swap(None, {**small, "buffer_size": 2048 * 256}))


@proof("parameters-stay-in-ram", fails="silent")
def parameters_stay_in_ram() -> None:
    for more, expected in (({}, 2_112_512), ({"max_in_cpu": 0}, 2)):
        config, _ = _nvme(None, {"buffer_size": 2048 * 256, **more})
        optimizer = train(config, wide=True).model_wrapped.optimizer
        assert sum(buffer.numel() for buffer in optimizer.param_groups_fp16_flat_cpu_memory) == expected


@proof("disk-too-small", fails="unshown")
def disk_too_small() -> None:
    """The ledger's disk rows are the swap files of the live engine."""
    from hf_memkit.catalog.models import describe
    from hf_memkit.deepspeed.engine_ledger import zero_ledger

    config, folder = _nvme({"buffer_count": 4}, {"buffer_size": 2048 * 256, "max_in_cpu": 0})
    done = train(config, wide=True, max_steps=2)
    shape = tempfile.mkdtemp()
    unset_hf_deepspeed_config()  # else transformers would split what is only described
    done.model.config.save_pretrained(shape)
    expected = zero_ledger(config | {"bf16": {}, "fp16": {}}, describe(shape, use_hub=False)).total_bytes("disk")
    real = sum(path.stat().st_size for path in files(folder))
    assert abs(real - expected) <= 0.01 * real, (real, expected)


@proof("gather-from-nvme-on-cpu", fails="late")
def gather_from_nvme_on_cpu() -> None:
    config, _ = _nvme(None, {"buffer_size": 2048 * 256, "max_in_cpu": 0})
    refused("contained shared tensors", lambda: train(config, wide=True).save_model())


@proof("resume-from-nvme", fails="silent")
def resume_from_nvme() -> None:
    """The first moments after a third step: with the two steps before them, and after a resume from the second."""

    def moments(folder: Path) -> float:
        # The resume copied the checkpoint's files beside those that it uses: of each size the last one written counts.
        result = sorted(folder.rglob("exp_avg-*"), key=lambda path: path.stat().st_mtime)
        last = {path.stat().st_size: path for path in result}.values()
        return sum(float(torch.frombuffer(bytearray(p.read_bytes()), dtype=torch.float32).abs().sum()) for p in last)

    config, whole = _nvme({"buffer_count": 4})
    first = train(config, wide=True, max_steps=3, save_strategy="steps", save_steps=2)
    config, resumed = _nvme({"buffer_count": 4})
    trainer(config, wide=True, max_steps=3).train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-2")
    assert 0 < moments(resumed) < 0.6 * moments(whole)
