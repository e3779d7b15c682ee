"""Reads a job's phase, the purpose of the allocation and the techniques in use from a traceback.

Reads tracebacks of Python, IPython and Rich. The innermost known frame decides. Frames are those of transformers 4.4x
to 5.23, torch 1.x to 2.13, accelerate 1.15, bitsandbytes 0.50, torchao 0.18, deepspeed 0.19.8, peft 0.21, trl 1.16 and
liger-kernel 0.8.5; names of other libraries are from users' tracebacks (`tests/measuring/out_of_memory/tracebacks.py`
has their addresses).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hf_memkit.common.terms import Phase
from hf_memkit.measuring.out_of_memory.surroundings import script_of_frames

BEGINS: Final = "Traceback (most recent call last)"

Place = Literal[
    "logits", "cross entropy", "attention", "optimizer states", "optimizer step", "recomputation",
    "predictions of an evaluation", "generation", "gathered weights", "merged adapters", "gathered layer",
    "reduced gradients",
]  # fmt: skip
"""What the allocation was for."""

Feature = Literal[
    "Adafactor or APOLLO", "adapters", "checkpointing", "chunked loss", "DeepSpeed", "diffusers", "flash attention",
    "FSDP", "fused optimizer", "label smoothing", "liger", "offload", "paged optimizer",
    "preprocess_logits_for_metrics", "quantized weights", "SDPA", "torch.compile", "trl", "unsloth", "vision tower",
    "vLLM", "ZeRO-3", "16-bit weights",
]  # fmt: skip
"""Techniques and libraries in use, by frames or arguments."""

Call = Literal["Liger's fused loss", "recomputation"]
"""Calls in which an error happened, by frames. The library is in use without them too."""


@dataclass(frozen=True, slots=True)
class TracebackFacts:
    """What one traceback shows.

    Attributes:
        phase: the phase of the job.
        place: what the allocation was for.
        library: the library of the optimizer, or the one that gathers weights.
        frame: the frame that shows the place: `"transformers/loss/loss_utils.py, ForCausalLMLoss: logits = …"`.
        model_type: model type of the failing code, by transformers' folder.
        in_use: techniques in the frames.
        calls: calls that had not returned.
        script: the user's script.
    """

    phase: Phase | None = None
    place: Place | None = None
    library: str | None = None
    frame: str | None = None
    model_type: str | None = None
    in_use: frozenset[Feature] = frozenset()
    script: str | None = None
    calls: frozenset[Call] = frozenset()

    def to_json(self) -> dict[str, Any]:
        shown = {name: getattr(self, name) for name in ("phase", "place", "library", "frame")}
        return {**shown, "in_use": sorted(self.in_use)}


# Functions in every traceback of a phase (transformers 5.23: trainer.py; torch/optim, torch/autograd; accelerate 1.15:
# accelerator.py). The order matters: training evaluates and saves, and DeepSpeed steps the optimizer in backward.
_PHASES: Final[tuple[tuple[Phase, re.Pattern[str]], ...]] = (
    ("best_model", re.compile(r"\b_load_best_model\b")),
    ("resume", re.compile(r"\b(?:_load_optimizer_and_scheduler|_load_from_checkpoint|deepspeed_load_checkpoint)\b")),
    ("evaluate", re.compile(
        r"\b(?:evaluation_loop|prediction_loop|prediction_step|predict_with_generate"
        r"|nested_concat|torch_pad_and_concatenate)\b")),
    ("save", re.compile(
        r"\b_?save_(?:checkpoint|model|pretrained|optimizer_and_scheduler|16bit_model)\b|\bmerge_and_unload\b"
        r"|\b(?:save_pretrained_(?:merged|gguf)|unsloth_save_model)\b"
        r"|/fsdp/_state_dict_utils\.py|Failed to clone\(\) tensor")),
    ("optimizer", re.compile(
        r"\b_?optimizer\.step\(|/torch/optim/\w{1,40}\.py|/(?:bitsandbytes|torchao)/optim/|\bclip_grad_norm_\b"
        r"|/grad_scaler\.py")),
    ("backward", re.compile(r"\.backward\(|_engine_run_backward|\bin backward\b")),
    ("forward", re.compile(r"\b(?:compute_loss|training_step)\b|\bin forward\b")),
    # Weights are moved, cast, copied, or wrapped by DDP or FSDP: activations do not exist yet.
    ("load", re.compile(
        r"\b(?:from_pretrained|_move_model_to_device|prepare_model|set_module_tensor_to_device|dispatch_model"
        r"|prepare_model_for_(?:kbit|int8)_training|create_reference_model|resize_token_embeddings|load_state_dict"
        r"|_load_state_dict_into\w*|_load_pretrained_model)\b"
        r"|/nn/modules/module\.py\b[^\n]{0,80}\b(?:_apply|convert)\b|/nn/parallel/distributed\.py\b[^\n]{0,60}\b__init__\b"
        r"|/bitsandbytes/nn/modules\.py\b[^\n]{0,60}\bto\b|/fsdp/_init_utils\.py|/fsdp/_wrap_utils\.py|\b_prepare_fsdp2\b"
        r"|/transformers/core_model_loading\.py|/huggingface_hub/file_download\.py")),
    ("data", re.compile(
        r"/datasets/(?:arrow_writer|builder)\.py|/datasets/arrow_dataset\.py\b[^\n]{0,80}\b(?:_?map\w*|filter"
        r"|save_to_disk)\b")),
)  # fmt: skip

# Patterns of one frame, "FILE, FUNCTION: SOURCE"; the first that matches decides.
_PLACES: Final[tuple[tuple[Place, str | None, str], ...]] = (
    ("merged adapters", "PEFT", r"/peft/tuners/\S+, (?:merge|get_delta_weight|_unload_and_optionally_merge)\b"),
    ("merged adapters", "Unsloth", r"/unsloth\w*/sav\w+\.py, (?:_?merge_\w+|unsloth_save_model)\b"),
    ("gathered weights", "DeepSpeed", r", \w*(?:consolidated_16bit_state_dict|save_16bit_model)\b"),
    ("gathered weights", "FSDP", r"torch/distributed/(?:fsdp|checkpoint)/\S+, \w*(?:state_dict|_unshard_params\w*)"
                                 r"|/fsdp/_state_dict_utils\.py|: Failed to clone\(\) tensor"
                                 r"|/fsdp_utils\.py, (?:save_fsdp|load_fsdp|fsdp2_get\w*state_dict)"),
    # torch 2.13: distributed/fsdp/_fully_shard, and version 1's _flat_param.py and _runtime_utils.py
    ("gathered layer", "FSDP", r"/fsdp/\S+, (?:foreach_all_gather\w*|init_all_gather_outputs|unshard|_unshard"
                               r"|all_gather_copy_in\w*|_alloc_padded_unsharded_flat_param)\b"),
    ("reduced gradients", "FSDP", r"/fsdp/\S+, (?:foreach_reduce\w*|_reduce_grad|_get_reduce_scatter_tensors)\b"),
    ("predictions of an evaluation", None, r"/trainer_pt_utils\.py, (?:nested_|torch_pad|distributed_concat|add\b)"
                                           r"|, (?:evaluation|prediction)_loop: .*(?:gather|pad_across|nested_)"),
    ("optimizer states", "bitsandbytes", r"/bitsandbytes/optim/\S+, (?:get_state_buffer|init_state):"),
    ("optimizer states", "torchao", r"/torchao/\S*optim\S*, (?:_new_buffer|_subclass_zeros|zeros):"),
    ("optimizer states", "DeepSpeed",
     r"/deepspeed/\S+, (?:initialize_optimizer_states|_create_fp32_\w+|_setup_for_real_optimizer)\b"
     r"|/deepspeed/runtime/(?:zero/stage\w+|bf16_optimizer)\.py, __init__:"),
    ("optimizer states", "PyTorch", r"/torch/optim/\w+\.py, (?:_init_group|step: .*zeros)"),
    ("optimizer states", None,
     r"(?:optim|adam|lion|adafactor)\w*(?:/\w+)*\.py, \w+: .*\b(?:zeros|empty)(?:_like)?\("),
    ("optimizer step", "PyTorch", r"/torch/optim/\w+\.py, _(?:multi_tensor|single_tensor|fused)_"),
    ("optimizer step", "bitsandbytes", r"/bitsandbytes/optim/\S+, update_step:"),
    ("optimizer step", "torchao", r"/torchao/\S*optim/\S+, (?:step|single_param_adam):"),
    ("recomputation", None,
     r"torch/utils/checkpoint\.py, (?:unpack_hook|recompute_fn|backward)\b|checkpoint\w*\.py, backward:"),
    ("logits", None, r", _?convert_to_fp32:|\blogits = .*(?:\.float\(\)|float32|lm_head\()"
                     r"|\blogits\.float\(\)|\bshift_logits = |\.(?:lm_head|embed_out)\("),
    ("cross entropy", None,
     r", (?:cross_entropy|fixed_cross_entropy|nll_loss|log_softmax|ForCausalLMLoss|ForMaskedLMLoss|kl_div"
     r"|selective_log_softmax|entropy_from_logits|\w*get_(?:batch|per_token)_logps\w*|\w*fused_linear_cross\w*)\b"
     r"|\bloss_fct\(|\.loss_function\(|label_smoother\(|LabelSmoother"),
    ("attention", None,
     r", (?:eager_attention_forward|sdpa_attention_forward|_?flash_attention_forward|_attn|core_attention"
     r"|_upcast_and_reordered_attn|get_attention_scores)\b|scaled_dot_product_attention\("
     r"|(?<!, )\b(?:attn_weights|attn_scores|attention_scores|attention_probs|attn_probs) = "),
    ("generation", "vLLM", r"/vllm/"),
    ("generation", None, r"/generation/\S+, |, generate\b|/cache_utils\.py, update:"),
)  # fmt: skip

_FEATURES: Final[tuple[tuple[Feature, str], ...]] = (
    ("Adafactor or APOLLO", r"/transformers/optimization\.py|/apollo_torch/"),
    ("adapters", r"/peft/"),
    # Not modeling_layers.py: every layer calls it, with and without checkpointing.
    ("checkpointing", r"torch/utils/checkpoint\.py|_gradient_checkpointing_func\(|activation_checkpointing/\w+\.py"
                      r"|hf_memkit/components/checkpoint_|Gradient_Checkpoint"),
    # trl 1.16: trainer/utils.py, add_fused_lm_head
    ("chunked loss", r"hf_memkit/components/chunked_loss|cut_cross_entropy|, _fused_(?:forward|logprob\w*):"),
    ("DeepSpeed", r"/deepspeed/"),
    ("diffusers", r"/diffusers/"),
    ("flash attention", r"flash_attn|flash_attention"),
    # DTensor's frames are those of FSDP2, unless tensor parallelism of transformers 5.23 calls it.
    ("FSDP", r"torch/distributed/fsdp/|_fully_shard|/fsdp_utils\.py"
             r"|\A(?![\s\S]*/tensor_parallel\.py)[\s\S]*torch/distributed/tensor/"),
    ("fused optimizer", r"/torch/optim/\w+\.py, _fused_"),
    ("label smoothing", r"label_smoother\(|LabelSmoother"),
    ("liger", r"/liger_kernel/"),
    ("offload", r"cpu_adam|(?<!_plugin\.)cpu_offload(?!=)|_swap|/zenflow/"),
    ("paged optimizer", r"\bget_paged\(|, get_paged:"),
    ("quantized weights", r"/bitsandbytes/nn/|/quantizers/quantizer_bnb"),
    ("unsloth", r"/unsloth(?:_zoo|_compiled_cache)?/"),
    ("preprocess_logits_for_metrics", r"\bpreprocess_logits_for_metrics\("),
    ("SDPA", r"(?i:sdpa)|scaled_dot_product_attention\("),
    # Not torch/_dynamo alone: torch's checkpointing and optimizers pass through it uncompiled.
    ("torch.compile", r"torch/_inductor/|/_aot_autograd/|/torchinductor_|torch/_dynamo/\S+, compile_wrapper\b"),
    ("trl", r"/trl/trainer/"),
    # transformers 5.23: models/*/modeling_*.py; allocations there do not depend on the text
    ("vision tower", r"\b(?:visual|vision_tower|vision_model|vision_encoder|visual_encoder|image_encoder)\("
                     r"|, get_(?:image|video)_features:"),
    ("vLLM", r"/vllm/"),
    ("ZeRO-3", r"/zero/(?:stage3|partition_param|partitioned_param|parameter_offload)|_zero3_consolidated"),
)  # fmt: skip

# liger-kernel 0.8.5: ops/fused_linear_cross_entropy.py; its forward of the model is in every traceback. torch 2.13:
# utils/checkpoint.py, whose other functions run the first forward too.
_CALLS: Final[tuple[tuple[Call, str], ...]] = (
    ("Liger's fused loss", r"/liger_kernel/[^:\n]{0,100}fused_linear_cross_entropy"),
    ("recomputation", r"torch/utils/checkpoint\.py, (?:recompute_fn|unpack_hook)\b"),
)

_MODEL: Final = re.compile(r"/models/\w+/modeling_(\w+)\.py$")

FRAME: Final = re.compile(r"\bFile \"([^\"\n]{1,400})\", line \d+, in (\S{1,200})")
"""A frame of Python's traceback, anywhere in the line."""

# Python; IPython 8, 7; Rich; pytest.
_FRAMES: Final = (
    FRAME,
    re.compile(r"^ {0,4}File ((?:[A-Za-z]:)?[^:\n\"]{1,400}):\d+, in ([^\s(]{1,200})\("),
    re.compile(r"^ {0,4}((?:[A-Za-z]:)?[^\s:]{1,400}\.py) in ([^\s(]{1,200})\("),
    re.compile(r"^ {0,4}((?:[A-Za-z]:)?[^:\n]{1,400}\.py):\d+:? in (\S{1,200})"),
)
_BEGUN: Final = re.compile(r"^ {0,4}(?:[/~]|[A-Za-z]:\\)[^\s:]{0,400}(?::\d{1,6}:? in)?\s{0,200}$")
"""The beginning of a frame's line that Rich wraps."""
_WARNED: Final = re.compile(r"(?:^|\s)([^\s:\"]{1,400}\.py):\d{1,6}: (\w{0,40}Warning): ([^\n]{0,80})")
_NOT_CLONED: Final = re.compile(r"Failed to clone\(\) tensor|\bmanaged by FSDP\.")
"""A warning that quotes the error (torch: torch/distributed/fsdp/_state_dict_utils.py; before 2.0
fully_sharded_data_parallel.py). Loggers and posts omit the file before it."""

_CURRENT: Final = re.compile(r"^ {0,4}(?:-{1,8}> ?\d+|❱ ?\d+ ?│?)([^\n]{0,400})")
"""The failed line among those that IPython and Rich print."""

_CARETS: Final = re.compile(r"^[\s~^]*$")


_FOREIGN: Final = 6
"""Maximum number of other processes' lines between two frames, or between the last frame and the message."""

_CAUGHT_LINES: Final = 60
"""Maximum number of lines from a traceback to its message. After more, the error was caught and the job went on."""


def trace(lines: Iterable[str]) -> TracebackFacts:
    """The last traceback in `lines` (without prefixes); if its first line is missing, the frames above the message."""
    kept = _last_traceback(_unwrap(list(lines)))
    if not kept:
        return TracebackFacts()
    slashed = [line.replace("\\", "/") for line in kept]
    phase = next((phase for phase, sign in _PHASES if any(sign.search(line) for line in slashed)), None)
    frames = list(_frames(kept))
    text = "\n".join(frames)
    in_use = frozenset(feature for feature, sign in _FEATURES if re.search(sign, text))
    calls = frozenset(call for call, sign in _CALLS if re.search(sign, text))
    heads = (frame.partition(", ") for frame in frames)
    script = script_of_frames([(file, rest.partition(":")[0]) for file, _, rest in heads])
    models = (match for frame in frames if (match := _MODEL.search(frame.partition(", ")[0])) is not None)
    outer = next(models, None)  # the whole model, not a tower in it
    model_type = outer[1] if outer is not None else None
    for frame in reversed(frames):
        for place, library, sign in _PLACES:
            if re.search(sign, frame) and not (place == "predictions of an evaluation" and phase != "evaluate"):
                return TracebackFacts(phase, place, library, _short(frame), model_type, in_use, script, calls)
    return TracebackFacts(phase, in_use=in_use, model_type=model_type, script=script, calls=calls)


def facts_of_warning(line: str) -> TracebackFacts | None:
    """What a warning that quotes an error shows; None if `line` is no such warning."""
    if (match := _WARNED.search(line)) is not None:
        file, category, words = match.groups()
    elif (match := _NOT_CLONED.search(line)) is not None:
        file, category, words = "/site-packages/torch/distributed/fsdp/_state_dict_utils.py", "UserWarning", match[0]
    else:
        return None
    return trace([BEGINS, f'File "{file}", line 0, in {category}', f"    {words}", ""])


# Page-locked RAM: torch's pin_memory, and an asynchronous copy to RAM, whose target torch pins (torch:
# aten/src/ATen/native/cuda/Copy.cu).
_PINS: Final = re.compile(
    r"\.pin_memory\(|\bpin_memory=True|, _?pin_memory\b|\.to\([^\n]{0,60}cpu[^\n]{0,60}non_blocking ?= ?True"
)


def pins(lines: Iterable[str]) -> bool:
    """Whether one of the two innermost frames of the last traceback allocates page-locked RAM."""
    return any(_PINS.search(frame) for frame in list(_frames(_last_traceback(list(lines))))[-2:])


def _unwrap(lines: list[str]) -> list[str]:
    """The lines, with each frame that Rich wrapped joined to one line."""
    unwrapped: list[str] = []
    for line in lines:
        if unwrapped and line.strip() and _BEGUN.match(unwrapped[-1]) is not None:
            begun = unwrapped[-1].rstrip()
            rest = line.strip()
            joined = f"{begun} {rest}" if begun.endswith(" in") else begun + rest
            if _frame_in(joined) is not None or _BEGUN.match(joined) is not None:
                unwrapped[-1] = joined
                continue
        unwrapped.append(line)
    return unwrapped


def _last_traceback(lines: list[str]) -> list[str]:
    begins = next((place for place in range(len(lines) - 1, -1, -1) if BEGINS in lines[place]), None)
    if begins is not None:
        frames = [place for place in range(begins, len(lines)) if _frame_in(lines[place]) is not None]
        return lines[begins:] if len(lines) - (frames or [begins])[-1] <= _CAUGHT_LINES else []
    first, foreign = None, 0
    for place in range(len(lines) - 2, -1, -1):  # the last line is the message's
        line = lines[place]
        if _frame_in(line) is not None:
            first, foreign = place, 0
        elif line.strip() and not line.startswith((" ", "\t", "-")):
            foreign += 1
            if foreign > _FOREIGN:
                break
    return lines[first:] if first is not None else []


def _frame_in(line: str) -> re.Match[str] | None:
    if ".py" not in line and "File" not in line:
        return None
    return next((match for pattern in _FRAMES if (match := pattern.search(line))), None)


# Progress that libraries print. The order matters: datasets' "Saving the dataset" is no save of a model. Words of
# transformers 4.3x to 5.23 (trainer.py, modeling_utils.py, core_model_loading.py), datasets 3 and 4
# (arrow_dataset.py, builder.py), trl 1.16 (trainer/sft_trainer.py), accelerate 1.15 and vLLM.
_PROGRESS: Final[tuple[tuple[Phase | None, re.Pattern[str]], ...]] = (
    ("best_model", re.compile(r"Loading best model from")),
    ("resume", re.compile(
        r"[Ll]oading (?:model|checkpoint) from \S*checkpoint-\d|Continuing training from"
        r"|[Rr]esum(?:e|ing) (?:training )?from")),
    ("load", re.compile(
        r"(?i:\bloading (?:a |the )?(?:checkpoint|safetensors|pt checkpoint|weights|model\b|pipeline))"
        r"|Materializing param|Fetching \d+ files")),
    ("data", re.compile(
        r"\b(?:Map|Filter|Flattening the indices|Saving the dataset|Loading dataset shards)\b[^\n:]{0,40}:"
        r"|[Rr]unning tokenizer|[Tt]okeniz(?:ing|ation)\b|Generating \w{1,40} (?:split|examples)|Grouping texts"
        r"|[Pp]acking \w|Applying (?:chat template|formatting function)|Converting \w{1,40} dataset|Truncating \w"
        r"|Preprocessing (?:the )?dataset|\(num_proc=\d+\)| examples/s\b")),
    ("save", re.compile(
        r"Writing model shards|Saving (?:model|checkpoint|FSDP|current|the (?:final )?model|Optimizer)"
        r"|Configuration saved in|[Mm]odel weights saved in|tokenizer config file saved|Saved? checkpoint")),
    ("optimizer", re.compile(  # deepspeed 0.19.8: before the first step, when the states are made
        r"Optimizer #\d{1,3} is created with|initializing optimizer states|as basic optimizer"
        r"|Creating \S+ ZeRO stage")),
    ("evaluate", re.compile(r"Running (?:Evaluation|Prediction)|\bEvaluat(?:ing|ion)\b[^\n]{0,40}\d%")),
    ("after", re.compile(r"['\"]train_runtime['\"]: |\btrain_runtime +=|Training completed")),
    (None, re.compile(r"Running training|['\"](?:eval_)?loss['\"]: ")),
)  # fmt: skip
_ENDED: Final = re.compile(r"\b100%\|")


def phase_of_progress(lines: Sequence[str]) -> Phase | None:
    """The phase by the last progress bar or message of a library in `lines`."""
    for line in reversed(lines):
        for phase, sign in _PROGRESS:
            if sign.search(line):
                # Any phase may follow data; loaded weights still fill the memory.
                return None if phase == "data" and _ENDED.search(line) else phase
    return None


def _frames(lines: list[str]) -> Iterator[str]:
    """`"FILE, FUNCTION: SOURCE"` of each frame, the innermost last."""
    head, source, marked = "", "", False
    for line in lines:
        frame = _frame_in(line)
        if frame is not None:
            if head:
                yield f"{head}: {source}"
            # IPython writes Class.function
            head = f"{frame[1]}, {frame[2].rpartition('.')[2]}".replace("\\", "/")
            source = ""
            marked = frame.re is not FRAME
        elif marked and (current := _CURRENT.match(line)) is not None:
            source = " ".join(current[1].replace("│", " ").split())
        elif head and not marked and line.startswith(" ") and not _CARETS.match(line):
            source = f"{source} {' '.join(line.split())}".strip()[:400]
    if head:
        yield f"{head}: {source}"


def _short(frame: str) -> str:
    """The frame with the path inside the library's folder only."""
    file, comma, rest = frame.partition(", ")
    folder = re.split(r"/(?:site|dist)-packages/", file)[-1]
    shown = rest.removesuffix(": ")  # no source
    return "/".join(folder.split("/")[-3:] if folder == file else [folder]) + comma + shown + "…)" * rest.endswith("(")
