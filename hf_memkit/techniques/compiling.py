"""torch.compile through Trainer's own arguments."""

from __future__ import annotations

from hf_memkit.errors import SettingError, did_you_mean
from hf_memkit.job import Job
from hf_memkit.technique import technique
from hf_memkit.techniques.compile_backends import BACKENDS, GRAPH_MODES, MODES, RETIRED
from hf_memkit.training_setup import TrainingSetup

__all__ = ["compiled"]

_LEAST_CAPABILITY = 7.0
"""What Triton makes kernels for (torch 2.13.0: torch/_inductor/exc.py, GPUTooOldForTriton)."""


@technique(
    "compile",
    family="compile",
    saves="activations that are cheap to make again from others, and the steps between fused operations",
    costs="the first steps take minutes, and so does each new kind of shape",
    not_when="runs of a few hundred steps, or batches of ever new shapes with CUDA graphs",
    values={"compile_backend": str, "compile_mode": str},
)
def compiled(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """`torch_compile` with a backend and a mode, and a guard that says when nothing is compiled.

    Raises:
        SettingError: a backend or mode that cannot train; says what to take instead.
    """
    backend = str(job.values.get("compile_backend", "inductor"))
    mode = str(job.values.get("compile_mode", "default"))
    _refuse(backend, mode)
    gpu = job.machine.gpu
    if backend == "inductor" and gpu is not None and gpu.capability is not None and gpu.capability < _LEAST_CAPABILITY:
        setup = setup.with_problems(
            [f"torch.compile makes kernels for compute capability 7.0 and later; {gpu.name} has {gpu.capability}"]
        )
    setup = setup.put_all(
        "arguments",
        {
            "torch_compile": (True, "the forward and backward pass become a few compiled graphs"),
            "torch_compile_backend": (backend, BACKENDS[backend]),
        },
    )
    if mode != "default":
        setup = setup.put("arguments.torch_compile_mode", mode, MODES[mode])
    if mode in GRAPH_MODES or backend == "cudagraphs":
        setup = setup.with_notes(
            "CUDA graphs hold memory for each shape they are recorded for: give every batch one shape (packing, or "
            "pad-to-multiple with pad_multiple as long as the longest sample)."
        )
    return setup.put(
        "trainer_parts.recompilation_guard", {},
        "stops the run if nothing was compiled, or torch gave up compiling after too many shapes",
    )  # fmt: skip


def _refuse(backend: str, mode: str) -> None:
    problems = []
    if backend in RETIRED:
        problems.append(f"compile_backend={backend}: {RETIRED[backend]}")
    elif backend not in BACKENDS:
        problems.append(
            f"compile_backend={backend}: no backend that trains{did_you_mean(backend, BACKENDS)}; known: "
            f"{', '.join(BACKENDS)}"
        )
    if mode not in MODES:
        hint = "; it is a backend" if mode in BACKENDS else did_you_mean(mode, MODES)
        problems.append(f"compile_mode={mode}: no mode{hint}; known: {', '.join(MODES)}")
    elif mode != "default" and backend in BACKENDS and backend != "inductor":
        problems.append(f"compile_mode={mode}: only backend 'inductor' has modes, and {backend!r} ignores it")
    if problems:
        raise SettingError("\n".join(problems))
