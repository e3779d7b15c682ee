"""torch.compile: settings that silently turn it on or off, and removed backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hf_memkit.checks.rule import Match, Rules, any_job, deepspeed
from hf_memkit.checks.subject import ABSENT, Subject
from hf_memkit.setup.techniques.compiling import BACKENDS, GRAPH_MODES, MODES, RETIRED
from hf_memkit.setup.techniques.registry import setting_of

_compiling: Final = Rules(techniques=("compile",))
_OTHER_DEVICES: Final = ("hpu_backend", "neuron", "openxla")


@_compiling.warning(
    why="a backend or a mode turns torch.compile on, even with torch_compile: false",
    fix=f"delete torch_compile_backend and torch_compile_mode, or write {setting_of('compile')}",
    source="transformers 5.23.0: training_args.py 1621-1622",
)
def compile_turned_on_unseen(subject: Subject) -> Iterator[Match]:
    if subject.argument("torch_compile", ABSENT) is False and subject.compiles:
        yield Match("torch_compile", False, argument=True)


@_compiling.warning(
    why='the backend "no" compiles nothing, even with torch_compile',
    fix="write torch_compile_backend: inductor, or delete both",
    source="accelerate 1.15.0: accelerator.py 2069",
)
def compile_backend_no(subject: Subject) -> Iterator[Match]:
    backend = subject.argument("torch_compile_backend")
    if backend is False or str(backend).lower() == "no":  # YAML reads a bare no as false
        yield Match("torch_compile_backend", backend, argument=True)


@_compiling.error(
    why="not a backend that can train: the run fails after loading the model, or at the first forward pass",
    fix="write torch_compile_backend: inductor",
    source="accelerate 1.15.0: utils/dataclasses.py, DynamoBackend; torch 2.13.0: _dynamo/backends/registry.py 130",
)
def compile_backend(subject: Subject) -> Iterator[Match]:
    value = subject.argument("torch_compile_backend")
    name = str(value).lower()
    if value is not None and value is not False and name not in ("no", *BACKENDS, *_OTHER_DEVICES):
        yield Match("torch_compile_backend", value, why=RETIRED.get(name, ""), argument=True)


@_compiling.error(
    why="not a mode of torch.compile; inductor fails at the first forward pass, and other backends ignore it",
    fix=f"write one of {', '.join(MODES)}",
    source="torch 2.13.0: _inductor/__init__.py, list_mode_options",
)
def compile_mode(subject: Subject) -> Iterator[Match]:
    mode = subject.argument("torch_compile_mode")
    if mode is not None and mode not in MODES:
        yield Match("torch_compile_mode", mode, argument=True)


@_compiling.warning(
    why="only the backend inductor has modes; the others ignore it and log that",
    fix="delete torch_compile_mode, or write torch_compile_backend: inductor",
    source="torch 2.13.0: _dynamo/backends/common.py 53, debugging.py, cudagraphs.py 262",
)
def compile_mode_ignored(subject: Subject) -> Iterator[Match]:
    backend = str(subject.argument("torch_compile_backend", "inductor")).lower()
    mode = subject.argument("torch_compile_mode")
    if mode not in (None, "default") and backend in BACKENDS and backend != "inductor":
        yield Match("torch_compile_mode", mode, argument=True)


@any_job.warning(
    why="torch records CUDA graphs for each number of tokens, and each graph keeps its own memory",
    fix='use mode "max-autotune-no-cudagraphs", or give every batch one shape',
    source="torch 2.13.0: _inductor/cudagraph_trees.py; _inductor/config.py, cudagraph_dynamic_shape_warn_limit",
    techniques=("compile", "padding-free"),
)
def compile_graphs_of_many_shapes(subject: Subject) -> Iterator[Match]:
    mode = subject.argument("torch_compile_mode")
    graphs = mode in GRAPH_MODES or subject.argument("torch_compile_backend") == "cudagraphs"
    packed = subject.setting("trainer_parts.packed_batches")
    one_row = packed is not None and packed.get("length") is None
    if graphs and (one_row or subject.argument("train_sampling_strategy") == "group_by_length"):
        key = "torch_compile_mode" if mode in GRAPH_MODES else "torch_compile_backend"
        yield Match(key, argument=True)


@deepspeed.warning(
    why="stage 3 gathers weights in a hook of every module, and each hook ends the graph: operations are fused within "
    "one module only, and every graph must be compiled",
    fix="leave torch_compile out, or use stage 2",
    source="deepspeed 0.19.8: runtime/zero/parameter_offload.py, hooks of setup_zero_stage3_hooks",
    techniques=("compile",),
)
def compile_at_stage_3(subject: Subject) -> Iterator[Match]:
    if subject.compiles and subject.zero.stage == 3:
        yield Match("torch_compile", argument=True)
