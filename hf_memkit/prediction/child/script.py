"""A user's script, run up to `train()` on a machine that seems to have the GPU asked for; there its training is traced.

In: a `ScriptRequest`. Out: a trace and what was trained, or why there is none. Runs in a process of its own, which is
the script's from then on and ends at `train()`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, Final, NoReturn

from hf_memkit.errors import MemkitError
from hf_memkit.prediction.trace_request import ScriptRequest

__all__ = ["run_script"]

_RANKS: Final = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip
"""The traced training is one process, whatever the one that asks is; of several it is told by `ranks.py`."""

_PACKAGE: Final = str(Path(__file__).resolve().parents[2])


def run_script(request: ScriptRequest, result: Path) -> None:
    """Writes to `result` what came of the script. Does not come back where it called `train()`."""
    _its_own_world(request)
    try:
        tracer, boundary = _pretend(request, result)
    except MemkitError as error:
        return _write(result, _failure(error))
    try:
        if boundary is None:
            request.script.run()
        else:
            with boundary:
                request.script.run()
    except SystemExit as error:
        _write(result, {"never_trained": True, "exit": error.code if isinstance(error.code, int) else str(error.code)})
    except MemkitError as error:
        _write(result, _failure(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _write(result, {"script_error": {"type": type(error).__name__, "text": _users_traceback(error)}})
    else:
        _write(result, {"never_trained": True, "exit": None})


def _its_own_world(request: ScriptRequest) -> None:
    os.environ.clear()
    os.environ.update({name: each for name, each in request.environment.items() if name not in _RANKS})
    os.environ.update({"HF_DEACTIVATE_ASYNC_LOAD": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"})
    os.chdir(request.folder)
    sys.path[1:1] = [each for each in request.environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    if request.stdin is not None:
        os.dup2(request.stdin, 0)
        sys.stdin = os.fdopen(0, closefd=False)


def _pretend(request: ScriptRequest, result: Path) -> tuple[Any, Any]:
    """The card, models as shapes, and the `train()` that is traced; for real tensors only the last."""
    import torch
    from transformers import Trainer

    from hf_memkit.prediction.child import at_train
    from hf_memkit.prediction.child.tracer import StorageTracer

    on_card = request.device == "cuda"
    tracer = StorageTracer("cuda" if on_card else "cpu", request.capability if on_card else None)
    boundary: Any = None
    if on_card:
        from hf_memkit.prediction.child.attention import install_cuda_attention
        from hf_memkit.prediction.child.cuda_questions import answer_scripts
        from hf_memkit.prediction.child.fake_gpu import one_card, one_stream
        from hf_memkit.prediction.child.flash_attn_package import install_flash_attn
        from hf_memkit.prediction.child.loaded_files import files_load_to_card

        one_card(request.capability, request.capacity_bytes, request.gpu_name)
        install_cuda_attention(request.capability)
        install_flash_attn(request.capability)
        one_stream()
        answer_scripts(tracer, request.capacity_bytes)
        files_load_to_card()
    if request.device != "real cpu":
        from hf_memkit.prediction.child.fake_gpu import movable_modules
        from hf_memkit.prediction.child.kernel_rules import learn_counts
        from hf_memkit.prediction.child.libraries import before_a_script
        from hf_memkit.prediction.child.pretrained import weights_are_shapes
        from hf_memkit.prediction.child.ranks import one_of_several
        from hf_memkit.prediction.child.real_and_fake import RealAndFake
        from hf_memkit.prediction.child.script_engine import without_engines

        learn_counts()
        movable_modules()
        before_a_script(on_card=on_card)
        without_engines()
        if request.processes > 1:
            one_of_several(request.processes, request.per_node)
        boundary = RealAndFake(tracer)
        weights_are_shapes(boundary)
    at_train.remember_train(Trainer.train)
    Trainer.evaluate = _evaluate_later(Trainer.evaluate)

    def train(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            found = _traced(self, tracer, boundary, request)
        except MemkitError as error:
            found = _failure(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            found = {"script_error": {"type": type(error).__name__, "text": _users_traceback(error)}, "in_train": True}
        _write(result, found)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    Trainer.train = train
    torch.set_num_threads(1)
    return tracer, boundary


def _evaluate_later(original: Any) -> Any:
    """An evaluation before `train()` would be made up: it is predicted after the two steps, and its loss is no number.
    """

    def evaluate(self: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        if getattr(self, "memkit_traced", False):
            return original(self, *args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[no-any-return]
        self.memkit_evaluates = True
        return {f"{metric_key_prefix}_loss": float("nan")}

    return evaluate


def _traced(trainer: Any, tracer: Any, boundary: Any, request: ScriptRequest) -> dict[str, Any]:
    from contextlib import ExitStack, contextmanager

    import transformers

    from hf_memkit.prediction.child.at_train import traced_training
    from hf_memkit.prediction.child.libraries import (
        install_library_rules,
        shapes_from_values_are_unmodelled,
    )

    if boundary is None:
        return traced_training(trainer, tracer, lambda: tracer, longest=request.longest)
    from hf_memkit.prediction.child.fake_gpu import made_up_values
    from hf_memkit.prediction.child.training import _write_nothing

    boundary.leave()

    @contextmanager
    def fake() -> Any:
        warnings.simplefilter("ignore")  # what libraries say of tensors without memory
        transformers.utils.logging.disable_progress_bar()
        made_up_values()
        _write_nothing()
        install_library_rules(_setup_of(trainer), on_card=request.device == "cuda")
        with ExitStack() as stack:
            stack.enter_context(shapes_from_values_are_unmodelled())
            stack.enter_context(boundary.all_fake())
            yield

    return traced_training(trainer, tracer, fake, longest=request.longest)


def _setup_of(trainer: Any) -> Any:
    """What the rules of libraries ask of a setup: the optimizer, Liger, packing, attention."""
    from hf_memkit.setup import Setup

    arguments = trainer.args
    setup = Setup(preset="script")
    setup = setup.put("arguments.optim", str(getattr(arguments.optim, "value", arguments.optim)), "the script's")
    if arguments.use_liger_kernel:
        setup = setup.put("arguments.use_liger_kernel", True, "the script's")
    if getattr(arguments, "packing", False):
        setup = setup.put("arguments.packing", True, "the script's")
    attention = getattr(getattr(trainer.model, "config", None), "_attn_implementation", None)
    if isinstance(attention, str):
        setup = setup.put("model.attn_implementation", attention, "the script's")
    return setup


def _failure(error: MemkitError) -> dict[str, Any]:
    from hf_memkit.prediction.child.real_and_fake import line_of

    return {
        "error": {
            "type": type(error).__name__, "message": str(error), "ours": True, "place": line_of(error.__traceback__),
            "traceback": traceback.format_exc()[-4000:],
        }
    }  # fmt: skip


def _users_traceback(error: BaseException) -> str:
    """As Python prints it, from the script's first frame on, without memkit's."""
    from hf_memkit.prediction.child.real_and_fake import is_library

    found = traceback.TracebackException.from_exception(error)
    seen: Any = found
    while seen is not None:
        frames = [frame for frame in seen.stack if _PACKAGE not in frame.filename]
        first = next((number for number, frame in enumerate(frames) if not is_library(frame.filename)), 0)
        seen.stack = traceback.StackSummary.from_list(frames[first:])
        seen = seen.__cause__ or seen.__context__
    return "".join(found.format())


def _write(result: Path, content: dict[str, Any]) -> None:
    temporary = result.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(result)
