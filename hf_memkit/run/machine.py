"""Requirements of a run: a machine with enough memory, environment variables, a GPU that torch can use, and
ZeRO-Infinity's swap folder, which is tested before anything is written and locked during the run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from hf_memkit.catalog.hardware import has_kernels, this_machine, torch_with_kernels
from hf_memkit.common.errors import DoesNotFitError, MissingPackageError, RunError
from hf_memkit.deepspeed import nvme, ops
from hf_memkit.deepspeed.stage_3 import SWAP_BUFFERS
from hf_memkit.prediction import Prediction
from hf_memkit.prediction.launch_command import launchers_engine
from hf_memkit.run.folder import RecipeRun
from hf_memkit.run.ranks import Ranks
from hf_memkit.setup.job import shortages
from hf_memkit.setup.process_group import single_process_environment
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.allocator import VARIABLE, set_allocator


def refuse_too_large(job: RecipeRun, say: Callable[[str], None]) -> None:
    """Refuse a run folder, perhaps written on another machine, whose ledger needs more than this machine has. Warns
    through `say` if a prediction does not fit."""
    if job.is_rehearsal:
        return
    machine = this_machine(nvme_path(job.setup) or job.output)
    if problems := shortages(job.setup.ledger, machine):
        raise DoesNotFitError(f"{job.output}: {'; '.join(problems)}")
    if job.prediction is not None and machine.gpu is not None:
        predicted = Prediction.from_json(job.prediction).with_verdict(machine)
        if predicted.verdict == "does not fit":
            say(f"memkit: warning: predicted not to fit: {predicted.why}")


def set_environment(setup: Setup, say: Callable[[str], None], ranks: Ranks) -> None:
    """Set the setup's variables unless the user has, and check that the GPU can be used. Raises MemkitError if torch
    cannot use the GPU, accelerate's launcher selects another engine, or the optimizer cannot be compiled."""
    _ignore_accelerate_config(say)
    variables = {name: str(value) for name, value in setup.section("environment").items()}
    if "deepspeed.config" in setup:
        variables |= single_process_environment()
    if VARIABLE in variables:
        set_allocator(variables.pop(VARIABLE), say)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if not setup.get("arguments.use_cpu"):
        _check_gpu(setup, ranks)


def _ignore_accelerate_config(say: Callable[[str], None]) -> None:
    """Keep `accelerate launch`'s config, which it passes to Trainer (accelerate:utils/launch.py), from changing the
    setup. Refuses a config that selects an engine."""
    if (engine := launchers_engine(os.environ)) is not None:
        conflict = f"accelerate's config selects {engine[1]}, but a recipe has its own engine"
        raise RunError(f"{conflict}. Start it without accelerate: memkit recipe NAME --gpus N")
    # TrainingArguments without bf16 or fp16 use this precision (transformers:training_args.py, "Mixed Precision"),
    # and bf16 weights would be autocast again.
    precision = os.environ.pop("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        say(f"accelerate's mixed_precision={precision} has no effect: the recipe sets the precision.")


def _check_gpu(setup: Setup, ranks: Ranks) -> None:
    """Raise the errors of `set_environment` about the GPU: otherwise Trainer uses the CPU, or several GPUs."""
    import torch

    if not torch.cuda.is_available():
        needs = f"this setup needs a GPU, and torch {torch.__version__} cannot use one here"
        raise RunError(f"{needs}. To see the cause and the fix, type: memkit doctor")
    visible = torch.cuda.device_count()
    if visible > 1 and not ranks.launched:
        raise RunError(f"this process has {visible} GPUs. Add --gpus {visible}, or set CUDA_VISIBLE_DEVICES to one")
    if visible < ranks.local_world_size:
        too_few = f"{ranks.local_world_size} processes, but only {visible} visible GPUs, on this machine"
        raise RunError(f"{too_few}. Start fewer processes, or change CUDA_VISIBLE_DEVICES")
    capability = torch.cuda.get_device_capability(ranks.local_rank)
    architectures = torch.cuda.get_arch_list()
    if not has_kernels(capability, architectures):
        has_none = f"torch {torch.__version__} has no kernels for compute capability {'.'.join(map(str, capability))}"
        raise RunError(f"{has_none}, which this GPU has. Install {torch_with_kernels(capability, architectures)}")
    if str(setup.get("optimizer.class", "")).endswith((":AdamW8bit", ":AdamW4bit")):
        missing = ops.missing_tools(("compiled optimizer",), cpu=True)
        if missing:
            install = f"sudo apt-get install {' '.join(missing)}"
            lacks = f"this machine lacks {', '.join(missing)}, which the optimizer's compilation needs"
            raise MissingPackageError(f"{lacks}. To install, type: {install}")


def nvme_path(setup: Setup) -> str | None:
    """DeepSpeed's swap folder, or None."""
    zero = setup.get("deepspeed.config", {}).get("zero_optimization", {})
    paths = [zero.get(part, {}).get("nvme_path") for part in ("offload_param", "offload_optimizer")]
    return next((str(path) for path in paths if path), None)


class Swap:
    """The setup's swap folder on this machine; no effect without swapping."""

    def __init__(self, setup: Setup, ranks: Ranks) -> None:
        self._path = nvme_path(setup)
        locked = sum(row.size_bytes for row in setup.ledger.rows if row.term in SWAP_BUFFERS)
        self._sizes = {
            "needed_bytes": setup.ledger.total_bytes("disk"),
            "locked_bytes": locked // ranks.local_world_size,
        }
        self._ranks = ranks

    def try_folder(self) -> None:
        """Test DeepSpeed's operations in the folder, without leaving files; raises as
        `hf_memkit.deepspeed.nvme.Preflight`."""
        if self._path is not None and self._ranks.leads_machine:
            nvme.preflight(self._path, **self._sizes).raise_problems()

    @contextlib.contextmanager
    def held(self, say: Callable[[str], None]) -> Iterator[None]:
        """Lock the folder for this run; ranks wait for the lock, and swapped files are removed afterwards."""
        if self._path is None:
            yield
            return
        leads = self._ranks.leads_machine
        with nvme.ready(self._path, say, **self._sizes) if leads else contextlib.nullcontext():
            self._ranks.wait_for_all("swap folder")
            yield

    def size_bytes(self) -> int:
        """Bytes swapped by all processes of this machine so far."""
        return nvme.swap_bytes(self._path) if self._path else 0
