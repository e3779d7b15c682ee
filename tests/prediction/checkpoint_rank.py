"""Runs `checkpoint_job.py` as one of several real ranks on a CPU, and prints the peaks of its phases, as JSON.

    python -m tests.prediction.checkpoint_rank RANK RANKS FOLDER [CASE…]

The CPU's memory counts as two: what a GPU would hold, and RAM. A copy between them is one of `Tensor.to`, `Tensor.cpu`
and FSDP2's move of a module, and is made here, too.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import linecache
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed import _functional_collectives, _state_dict_utils, checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils._pytree import tree_leaves
from transformers import Trainer

from hf_memkit.components.fsdp2_on_cpu import trainer_options
from hf_memkit.prediction.child.gpu.fsdp import patch_fsdp
from hf_memkit.prediction.child.tracer.host_memory import HostWatch
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.child.training.at_train import traced_training
from hf_memkit.prediction.child.training.evaluations import Evaluations
from tests.prediction.checkpoint_job import arguments_of, trainer_of
from tests.prediction.fsdp_rank import COPY_OF_GLOO

CASES: Final[dict[str, dict[str, Any]]] = {  # of fsdp_config
    "full": {"state_dict_type": "FULL_STATE_DICT"},
    "sharded": {"state_dict_type": "SHARDED_STATE_DICT"},
    "full, offload": {"state_dict_type": "FULL_STATE_DICT", "cpu_offload": True},
    "full, loaded by the first": {"state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": True},
}


NOT_COUNTED: Final = (COPY_OF_GLOO, "cuBLAS workspace")


class TwoSpaces(StorageTracer):
    """Counts storages on the CPU as a GPU's, but for those made while `space` is "ram", or from such."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.host = HostWatch()
        self.space: str | None = "ram"  # None: that of the operation's first tensor
        self.named = False  # whether the running operation names a device

    @contextlib.contextmanager
    def within(self, space: str) -> Iterator[None]:
        """Within it all storages are of that space."""
        outer, self.space = self.space, space
        try:
            yield
        finally:
            self.space = outer

    def in_ram(self, tensor: Any) -> bool:
        local = getattr(tensor, "_local_tensor", tensor)
        return local.untyped_storage()._cdata in self.host._live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self.named = self.named, "device" in (kwargs or {})
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.named = outer

    def _watch(self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        if tensor.dtype is torch.uint8 or tensor.is_meta:  # the first: pickled objects, which ranks exchange
            return None
        if hasattr(tensor, "__tensor_flatten__") or tensor.untyped_storage()._cdata in self._live:
            return super()._watch(tensor, func, args)
        first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)
        in_ram = func != "before training" and not self.named if first is None else self.in_ram(first)
        if self.in_ram(tensor) or (in_ram if self.space is None else self.space == "ram"):
            self.host.watch(tensor, func)
        else:
            super()._watch(tensor, func, args)


def make_copies(tracer: TwoSpaces) -> None:
    """Makes the copies between GPU and RAM that torch omits on a CPU: to RAM where the line of the call names the CPU,
    else to the GPU."""

    def moved(tensor: Any, space: str) -> Any:
        if tracer.in_ram(tensor) == (space == "ram"):
            return tensor
        with tracer.within(space):
            return tensor.clone()

    def copying(original: Any) -> Any:
        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            named = [value for value in (*args, kwargs.get("device")) if isinstance(value, str | torch.device)]
            if original is not to_cpu and not any(torch.device(name).type == "cpu" for name in named):
                return original(tensor, *args, **kwargs)
            frame = sys._getframe(1)
            if frame.f_code.co_name == "_process_value_according_to_param_policy":  # a state follows its parameter
                return moved(tensor, "ram" if tracer.in_ram(frame.f_locals["param"]) else "gpu")
            caller = inspect.getframeinfo(frame, context=0)
            lines = range(caller.positions.lineno, caller.positions.end_lineno + 1)
            is_to_cpu = any("cpu" in linecache.getline(caller.filename, line) for line in lines)
            return moved(tensor, tracer.space or ("ram" if is_to_cpu else "gpu"))

        return copy

    def move(parameters: Any, buffers: Any, device: Any) -> None:
        for tensor in (*parameters, *buffers):
            if tensor.device.type != "meta":
                tensor.data = moved(tensor.data, "gpu")

    to_cpu = torch.Tensor.cpu
    torch.Tensor.cpu, torch.Tensor.to = copying(to_cpu), copying(torch.Tensor.to)
    _fsdp_init._move_states_to_device = move


def run(name: str, folder: str) -> dict[str, Any]:
    tracer = TwoSpaces()
    save, load = checkpoint.save, checkpoint.load
    patch_fsdp(tracer)
    checkpoint.save, checkpoint.load = save, load
    make_copies(tracer)
    read = torch.load

    def load_to_ram(*args: Any, **kwargs: Any) -> Any:
        with tracer.within("ram"):
            return read(*args, **kwargs)

    torch.load = load_to_ram
    broadcast = _state_dict_utils._broadcast_tensors

    def broadcast_in_space(whole: Any, states: Any, keys: Any, *args: Any, **kwargs: Any) -> None:
        """Gloo broadcasts what goes to states in RAM, and NCCL the rest."""
        in_ram = any(tracer.in_ram(states[key]) for key in keys if key in states)
        with tracer.within("ram" if in_ram else "gpu"):
            broadcast(whole, states, keys, *args, **kwargs)

    _state_dict_utils._broadcast_tensors = broadcast_in_space
    wait = _functional_collectives.wait_tensor

    def wait_tensor(tensor: Any) -> Any:
        result = wait(tensor)
        time.sleep(0.01)  # gloo's thread frees what was sent some time after it is done
        return result

    vars(_functional_collectives)["wait_tensor"] = wait_tensor
    arguments = arguments_of(f"{folder}/{name}", {"use_cpu": True, "fsdp_config": dict(CASES[name])})
    trainer_options(model=None, processing_class=None, arguments=arguments)
    plugin = AcceleratorState().fsdp_plugin
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    shared = Path(folder, name, "traced")
    shared.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryDirectory = lambda: contextlib.nullcontext(str(shared))
    with tracer:
        trainer = trainer_of(arguments)
        tracer.space = None
        training = traced_training(
            trainer, Trainer.train, tracer, contextlib.nullcontext(), Evaluations(worst=False), worst=False
        )
    return {"gpu": peaks_of(training.trace), "ram": training.host.tensor_bytes}


def peaks_of(trace: Any) -> dict[str, int]:
    """The most living bytes in each phase."""
    peaks: dict[str, int] = {}
    live = start = 0
    for end, phase in trace.marks:
        most = live
        for event in trace.events[start:end]:
            number = abs(event) - 1
            counts = trace.operations[trace.operation_of[number]] not in NOT_COUNTED
            live += (1 if event > 0 else -1) * counts * trace.sizes_bytes[number]
            most = max(most, live)
        peaks[phase] = max(peaks.get(phase, 0), most)
        start = end
    return peaks


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    for name in sys.argv[4:] or CASES:
        process = os.fork()  # patches and accelerate's state stay in the case's process
        if process == 0:
            dist.init_process_group("gloo", f"file://{folder}/{name}.store", rank=rank, world_size=ranks)
            print(json.dumps({name: run(name, folder)}), flush=True)
            dist.destroy_process_group()
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0


if __name__ == "__main__":
    main()
