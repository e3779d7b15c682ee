"""What must be so before a setup trains: a machine that holds it, its environment variables, a GPU that torch can use,
and the folder that ZeRO-Infinity swaps to, which is tried before anything is written and held while the run lasts."""

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


def refuse_what_does_not_fit(job: RecipeRun, say: Callable[[str], None]) -> None:
    """Refuses a folder, perhaps written on another machine, whose ledger needs more than this machine has. Says so
    through `say` if a prediction does not fit."""
    if job.is_rehearsal:
        return
    machine = this_machine(nvme_path(job.setup) or job.output)
    if found := shortages(job.setup.ledger, machine):
        raise DoesNotFitError(f"{job.output}: {'; '.join(found)}")
    if job.prediction is not None and machine.gpu is not None:
        predicted = Prediction.from_json(job.prediction).with_verdict(machine)
        if predicted.verdict == "does not fit":
            say(f"memkit: warning: predicted not to fit: {predicted.why}")


def set_environment(setup: Setup, say: Callable[[str], None], ranks: Ranks) -> None:
    """Sets the setup's variables where the user has not, and makes sure that the GPU can be used: an error where torch
    cannot, accelerate's launcher brings an engine of its own, or the optimizer cannot be compiled."""
    _leave_accelerate_aside(say)
    variables = {name: str(value) for name, value in setup.section("environment").items()}
    if "deepspeed.config" in setup:
        variables |= single_process_environment()
    if VARIABLE in variables:
        set_allocator(variables.pop(VARIABLE), say)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if not setup.get("arguments.use_cpu"):
        _check_gpu(setup, ranks)


def _leave_accelerate_aside(say: Callable[[str], None]) -> None:
    """`accelerate launch` also hands its config to Trainer (accelerate:utils/launch.py): where that would change the
    setup, it must not. Refuses a config with an engine of its own."""
    if (found := launchers_engine(os.environ)) is not None:
        raise RunError(
            f"accelerate's config selects {found[1]}; the recipe sets up its own engine. Start it without "
            f"accelerate: memkit recipe NAME --gpus N"
        )
    # TrainingArguments without bf16 or fp16 take this for the precision (transformers:training_args.py, "Mixed
    # Precision"), and weights that are bf16 already would be autocast again.
    precision = os.environ.pop("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        say(f"accelerate's mixed_precision={precision} has no effect: the recipe sets the precision.")


def _check_gpu(setup: Setup, ranks: Ranks) -> None:
    """Raises what `set_environment` says of the GPU: otherwise Trainer goes to the CPU, or to several GPUs."""
    import torch

    if not torch.cuda.is_available():
        raise RunError(
            f"this setup needs a GPU, and torch {torch.__version__} cannot use one here: there is no GPU, the driver "
            f"is too old, or torch is a CPU build. `memkit doctor` prints the fix"
        )
    visible = torch.cuda.device_count()
    if visible > 1 and not ranks.launched:
        raise RunError(
            f"one process sees {visible} GPUs. Add --gpus {visible}, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
    if visible < ranks.local_world_size:
        raise RunError(
            f"{ranks.local_world_size} processes run on this machine, but only {visible} GPUs are visible "
            f"(CUDA_VISIBLE_DEVICES). Each process needs one GPU: start fewer processes, or make more GPUs visible"
        )
    capability = torch.cuda.get_device_capability(ranks.local_rank)
    architectures = torch.cuda.get_arch_list()
    if not has_kernels(capability, architectures):
        raise RunError(
            f"torch {torch.__version__} has no kernels for this GPU (compute capability {capability[0]}."
            f"{capability[1]}). Install {torch_with_kernels(capability, architectures)}"
        )
    if str(setup.get("optimizer.class", "")).endswith((":AdamW8bit", ":AdamW4bit")):
        missing = ops.missing_tools(("compiled optimizer",), cpu=True)
        if missing:
            raise MissingPackageError(
                f"the optimizer step needs a compiler; missing: {', '.join(missing)}; "
                f"run: sudo apt-get install {' '.join(missing)}"
            )


def nvme_path(setup: Setup) -> str | None:
    """Where DeepSpeed swaps to, or None."""
    zero = setup.get("deepspeed.config", {}).get("zero_optimization", {})
    paths = [zero.get(part, {}).get("nvme_path") for part in ("offload_param", "offload_optimizer")]
    return next((str(path) for path in paths if path), None)


class Swap:
    """The setup's swap folder on this machine; does nothing where the setup swaps nothing."""

    def __init__(self, setup: Setup, ranks: Ranks) -> None:
        self._path = nvme_path(setup)
        self._needed_bytes = setup.ledger.total_bytes("disk")
        locked = sum(row.size_bytes for row in setup.ledger.rows if row.term in SWAP_BUFFERS)
        self._locked_bytes = locked // ranks.local_world_size
        self._ranks = ranks

    def try_folder(self) -> None:
        """Tries all that DeepSpeed will do there, and leaves nothing behind; raises as
        `hf_memkit.deepspeed.nvme.Preflight`."""
        if self._path is not None and self._ranks.leads_machine:
            nvme.preflight(
                self._path, needed_bytes=self._needed_bytes, locked_bytes=self._locked_bytes
            ).raise_problems()

    @contextlib.contextmanager
    def held(self, say: Callable[[str], None]) -> Iterator[None]:
        """Keeps the folder for this run; no rank enters before it is held, and nothing swapped stays behind."""
        if self._path is None:
            yield
            return
        folder = (
            nvme.ready(self._path, say, needed_bytes=self._needed_bytes, locked_bytes=self._locked_bytes)
            if self._ranks.leads_machine
            else contextlib.nullcontext()
        )
        with folder:
            self._ranks.wait_for_all("swap folder")
            yield

    def size_bytes(self) -> int:
        """What all processes of this machine have swapped there by now."""
        return nvme.swap_bytes(self._path) if self._path else 0
