"""Ways to train with something that reports memory: each trains the same small GPT-2 and says how long steps took."""

from __future__ import annotations

import importlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.stopwatch import Stopwatch, watching
from hf_memkit.common.units import MIB

OUTER: Final = (
    "hf_memkit.measuring.callback.callback:MemoryReportCallback.on_*",
    "hf_memkit.measuring.memory.hooks:ModelHook.__call__",
)
"""Everything of ours that runs in a step runs inside one of these."""

PARTS: Final[Mapping[str, Sequence[str]]] = {
    "events": OUTER[:1],
    "hooks": OUTER[1:],
    "readers": (
        "hf_memkit.measuring.memory.readers.base:ReaderGroup.read",
        "hf_memkit.measuring.memory.readers.base:ReaderGroup.peak",
        "hf_memkit.measuring.memory.readers.base:ReaderGroup.mark",
        "hf_memkit.measuring.memory.readers.base:ReaderGroup.reset_peak",
    ),
    "stand-in": ("benchmarks.overhead_arms:StandInCounters.memory_stats_as_nested_dict",),
    "walks": (
        "hf_memkit.measuring.memory.holdings:Inventory.look",
        "hf_memkit.measuring.memory.holdings:Inventory.gradient_bytes",
    ),
    "writer": ("hf_memkit.measuring.memory.records:RecordWriter.write",),
}
"""Where the time of our callback goes. `events` and `hooks` are what is left of them after the others; `stand-in`, on
a CPU, is what making up the counters takes: on a GPU, torch's own call takes its place."""


@dataclass(frozen=True)
class Size:
    """GPT-2 with 12 layers: 148 parameter tensors. `batch` sequences of `length` tokens a step.

    `cpu_clock`: time inside an arm's own code is this thread's CPU time, for a machine that is busy with other things.
    """

    width: int = 64
    layers: int = 12
    batch: int = 1
    length: int = 32
    vocabulary: int = 256
    cpu_clock: bool = False


@dataclass(frozen=True)
class Timings:
    """Of one training. `step_us`: from the beginning of a step to that of the next; `inside_us`: of that in the arm's
    own code, empty where that cannot be told; `parts_us`: the latter's mean a step, by part."""

    step_us: list[float]
    inside_us: list[float] = field(default_factory=list)
    parts_us: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """`train(size, steps, folder)` trains and returns its timings; `against` is the arm without the reporting."""

    name: str
    what: str
    train: Callable[[Size, int, Path], Timings]
    against: str | None = "nothing"
    needs: str | None = None
    cpu_only: bool = False


def make_model(size: Size) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=size.layers, n_embd=size.width, n_head=max(2, size.width // 64), vocab_size=size.vocabulary,
            n_positions=size.length, bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def make_data(size: Size) -> list[dict[str, Any]]:
    import torch

    tokens = torch.randint(0, size.vocabulary, (64, size.length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def with_trainer(
    callbacks: Callable[[], list[Any]] = list,
    functions: Mapping[str, Sequence[str]] | None = None,
    **arguments: Any,
) -> Callable[[Size, int, Path], Timings]:
    """An arm that is a Trainer with these callbacks. What they do in their events is the arm's own code, and so are
    `functions`, by part."""

    def train(size: Size, steps: int, folder: Path) -> Timings:
        import torch
        from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

        times_s: list[float] = []
        stopwatch = Stopwatch(time.thread_time if size.cpu_clock else time.perf_counter)

        class Clock(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                times_s.append(time.perf_counter())
                stopwatch.lap()

        made = callbacks()
        for callback in made if functions is None else ():
            for name in [name for name in vars(type(callback)) if name.startswith("on_")]:
                setattr(callback, name, stopwatch.timed(getattr(callback, name), "events"))
        trainer = Trainer(
            model=make_model(size),
            args=TrainingArguments(
                output_dir=str(folder), max_steps=steps + 1, per_device_train_batch_size=size.batch, logging_steps=50,
                save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
                dataloader_pin_memory=False, **arguments,
            ),
            train_dataset=make_data(size),
            callbacks=made,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.callback_handler.callbacks.insert(0, Clock())
        with watching(stopwatch, functions or {}):
            trainer.train()
        return timings(times_s, stopwatch, bool(made))

    return train


def timings(times_s: Sequence[float], stopwatch: Stopwatch, watched: bool) -> Timings:
    """One figure for each step but the last, whose end nobody saw."""
    step_us = [(after - before) * 1e6 for before, after in itertools.pairwise(times_s)]
    inside = stopwatch.laps_us if watched else []
    return Timings(step_us, inside, {part: spent_us / len(inside) for part, spent_us in stopwatch.parts_us.items()})


def memkit(**options: Any) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        from hf_memkit import MemoryReportCallback

        return [MemoryReportCallback(summary=False, html=False, **options)]

    return make


def memkit_with_allocator() -> list[Any]:
    from hf_memkit.measuring.memory.readers.host import HostReader

    return memkit(readers=[HostReader(), stand_in_reader()])()


class StandInCounters:
    """What the CUDA reader asks of `torch.cuda`, made up, with as many entries as torch's: a CPU has no allocator to
    ask, and phases and categories begin where there is one. Allocated rises and falls, so that peaks move."""

    asked = 0

    def memory_stats_as_nested_dict(self, device: Any) -> dict[str, Any]:
        self.asked += 1
        allocated = (100 + 10 * (self.asked % 7)) * MIB
        numbers = {"current": allocated, "peak": allocated + 5 * MIB, "allocated": 0, "freed": 0}
        kinds = (
            "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
            "inactive_split_bytes", "requested_bytes",
        )  # fmt: skip
        stats: dict[str, Any] = {
            kind: {pool: dict(numbers) for pool in ("all", "small_pool", "large_pool")} for kind in kinds
        }
        return {**stats, "num_alloc_retries": 0, "num_ooms": 0, "max_split_size": -1}

    def is_initialized(self) -> bool:
        return True

    def reset_peak_memory_stats(self, device: Any) -> None:
        return None

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=16 * 1024 * MIB)


def stand_in_reader() -> Any:
    """The CUDA reader over `StandInCounters`; to it the CPU is the GPU."""
    import torch

    from hf_memkit.measuring.memory.readers.allocators import CachingAllocatorReader

    return CachingAllocatorReader(StandInCounters(), torch.device("cpu"))


def torchtitan_style() -> list[Any]:
    """What torchtitan reads at a logging step (torchtitan: components/metrics.py, DeviceMemoryMonitor), at each step:
    peaks and retries of the allocator, then a reset; the process's memory where there is no allocator."""
    import psutil
    import torch
    from transformers import TrainerCallback

    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    class CounterReading(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if device is None:
                self.read = {"rss_gib": psutil.Process().memory_info().rss / 2**30}
                return
            stats = torch.cuda.memory_stats(device)
            self.read = {
                "max_active_gib": stats["active_bytes.all.peak"] / 2**30,
                "max_reserved_gib": stats["reserved_bytes.all.peak"] / 2**30,
                "num_alloc_retries": stats["num_alloc_retries"],
                "num_ooms": stats["num_ooms"],
            }
            torch.cuda.reset_peak_memory_stats(device)

    return [CounterReading()]


def with_lightning(monitored: bool) -> Callable[[Size, int, Path], Timings]:
    """Lightning's own Trainer with its CSV logger, which the monitor needs, at every batch."""

    def train(size: Size, steps: int, folder: Path) -> Timings:
        import torch

        lightning: Any = importlib.import_module("lightning.pytorch")  # not a dependency, so not known to mypy either
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        times_s: list[float] = []
        stopwatch = Stopwatch(time.thread_time if size.cpu_clock else time.perf_counter)

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = make_model(size)

            def training_step(self, batch: Any, index: int) -> Any:
                return self.model(**batch).loss

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=5e-5)

        class Clock(lightning.Callback):  # type: ignore[misc]
            def on_train_batch_start(self, *_: Any) -> None:
                times_s.append(time.perf_counter())
                stopwatch.lap()

        trainer = lightning.Trainer(
            max_steps=steps + 1, max_epochs=-1, accelerator="auto", devices=1, log_every_n_steps=1,
            logger=lightning.loggers.CSVLogger(str(folder)), enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False,
            callbacks=[Clock(), *([lightning.callbacks.DeviceStatsMonitor()] if monitored else [])],
        )  # fmt: skip
        data: Any = make_data(size)
        loader: Any = torch.utils.data.DataLoader(data, batch_size=size.batch, shuffle=True)
        functions = {"events": ["lightning.pytorch.callbacks:DeviceStatsMonitor.on_*"]} if monitored else {}
        with watching(stopwatch, functions):
            trainer.fit(Module(), loader)
        return timings(times_s, stopwatch, monitored)

    return train


OURS: Final = {"all": OUTER}

ARMS: Final = (
    Arm("nothing", "Trainer alone", with_trainer(), against=None),
    Arm("memkit", "MemoryReportCallback()", with_trainer(memkit(), OURS)),
    Arm(
        "memkit-allocator", "the same over a stand-in for CUDA's counters: phases and categories on",
        with_trainer(memkit_with_allocator, OURS), cpu_only=True,
    ),
    Arm("memkit-no-phases", "MemoryReportCallback(phases=False)", with_trainer(memkit(phases=False), OURS)),
    Arm(
        "counters", "torchtitan's counters, read at every step",
        with_trainer(torchtitan_style),
    ),
    Arm("memory-metrics", "Trainer(skip_memory_metrics=False)", with_trainer(skip_memory_metrics=False)),
    Arm("lightning", "Lightning's Trainer, CSV logger", with_lightning(False), against=None, needs="lightning"),
    Arm(
        "lightning-monitor", "the same with DeviceStatsMonitor()", with_lightning(True), against="lightning",
        needs="lightning",
    ),
)  # fmt: skip
