"""What a traceback shows of a job: the phase, what the allocation was for, and the techniques in use. In: lines, in
the form of Python, IPython or Rich. Out: `Traced`.

The innermost known frame decides. Frames are those of transformers 4.4x to 5.23, torch 1.x to 2.13,
accelerate 1.15, bitsandbytes 0.50, torchao 0.18, deepspeed 0.19.8, peft 0.21, trl 1.16 and liger-kernel 0.8.5; what is
named only here was seen in users' tracebacks (`tests/measuring/out_of_memory/tracebacks.py` has their addresses).
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
    "logits",
    "cross entropy",
    "attention",
    "optimizer states",
    "optimizer step",
    "recomputation",
    "predictions of an evaluation",
    "generation",
    "gathered weights",
    "merged adapters",
]
"""What was being made."""

Feature = Literal[
    "adapters", "checkpointing", "chunked loss", "DeepSpeed", "diffusers", "flash attention", "FSDP",
    "fused optimizer", "label smoothing", "liger", "offload", "paged optimizer", "preprocess_logits_for_metrics",
    "quantized weights", "SDPA", "trl", "unsloth", "vision tower", "vLLM", "ZeRO-3",
    "16-bit weights",
]  # fmt: skip
"""What frames, or arguments, can show in use."""


@dataclass(frozen=True, slots=True)
class Traced:
    """What one traceback shows.

    Attributes:
        phase, place: what was going on, and what the allocation was for; None if no frame shows it.
        library: the library of the optimizer, or the one that gathers weights.
        frame: the frame that shows the place: `"transformers/loss/loss_utils.py, ForCausalLMLoss: logits = …"`.
        model_type: the model type of the failing code, as transformers' folders name it.
        in_use: techniques that the frames show.
        script: the user's script.
    """

    phase: Phase | None = None
    place: Place | None = None
    library: str | None = None
    frame: str | None = None
    model_type: str | None = None
    in_use: frozenset[Feature] = frozenset()
    script: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "place": self.place,
            "library": self.library,
            "frame": self.frame,
            "in_use": sorted(self.in_use),
        }


# Names of functions that stand in every traceback of the kind (transformers 5.23: trainer.py; torch: torch/optim,
# torch/autograd; accelerate 1.15: accelerator.py). In this order: an evaluation and a save run inside training, and
# DeepSpeed steps its optimizer inside backward.
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
    # Weights on their way to a device, cast, copied, wrapped by DDP or FSDP: activations do not exist yet.
    ("load", re.compile(
        r"\b(?:from_pretrained|_move_model_to_device|prepare_model|set_module_tensor_to_device|dispatch_model"
        r"|prepare_model_for_(?:kbit|int8)_training|create_reference_model|resize_token_embeddings|load_state_dict"
        r"|_load_state_dict_into\w*|_load_pretrained_model)\b"
        r"|/nn/modules/module\.py\b[^\n]{0,80}\b(?:_apply|convert)\b|/nn/parallel/distributed\.py\b[^\n]{0,60}\b__init__\b"
        r"|/bitsandbytes/nn/modules\.py\b[^\n]{0,60}\bto\b|/fsdp/_init_utils\.py|/fsdp/_wrap_utils\.py"
        r"|/transformers/core_model_loading\.py|/huggingface_hub/file_download\.py")),
    ("data", re.compile(
        r"/datasets/(?:arrow_writer|builder)\.py|/datasets/arrow_dataset\.py\b[^\n]{0,80}\b(?:_?map\w*|filter"
        r"|save_to_disk)\b")),
)  # fmt: skip

# Each is looked for in "FILE, FUNCTION: SOURCE" of one frame; of two that match, the first.
_PLACES: Final[tuple[tuple[Place, str | None, str], ...]] = (
    ("merged adapters", "PEFT", r"/peft/tuners/\S+, (?:merge|get_delta_weight|_unload_and_optionally_merge)\b"),
    ("merged adapters", "Unsloth", r"/unsloth\w*/sav\w+\.py, (?:_?merge_\w+|unsloth_save_model)\b"),
    ("gathered weights", "DeepSpeed", r", \w*(?:consolidated_16bit_state_dict|save_16bit_model)\b"),
    ("gathered weights", "FSDP", r"torch/distributed/(?:fsdp|checkpoint)/\S+, \w*(?:state_dict|_unshard_params\w*)"
                                 r"|/fsdp/_state_dict_utils\.py|: Failed to clone\(\) tensor"
                                 r"|/fsdp_utils\.py, (?:save_fsdp|fsdp2_\w*state_dict)"),
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
    ("adapters", r"/peft/"),
    # Not modeling_layers.py: every layer passes through it, with checkpointing and without.
    ("checkpointing", r"torch/utils/checkpoint\.py|_gradient_checkpointing_func\(|activation_checkpointing/\w+\.py"
                      r"|hf_memkit/components/checkpoint_|Gradient_Checkpoint"),
    # trl 1.16: trainer/utils.py, add_fused_lm_head
    ("chunked loss", r"hf_memkit/components/chunked_loss|cut_cross_entropy|, _fused_(?:forward|logprob\w*):"),
    ("DeepSpeed", r"/deepspeed/"),
    ("diffusers", r"/diffusers/"),
    ("flash attention", r"flash_attn|flash_attention"),
    ("FSDP", r"torch/distributed/fsdp/|_fully_shard|/fsdp_utils\.py"),
    ("fused optimizer", r"/torch/optim/\w+\.py, _fused_"),
    ("label smoothing", r"label_smoother\(|LabelSmoother"),
    ("liger", r"/liger_kernel/"),
    ("offload", r"cpu_adam|cpu_offload|_swap|/zenflow/"),
    ("paged optimizer", r"\bget_paged\(|, get_paged:"),
    ("quantized weights", r"/bitsandbytes/nn/|/quantizers/quantizer_bnb"),
    ("unsloth", r"/unsloth(?:_zoo|_compiled_cache)?/"),
    ("preprocess_logits_for_metrics", r"\bpreprocess_logits_for_metrics\("),
    ("SDPA", r"(?i:sdpa)|scaled_dot_product_attention\("),
    ("trl", r"/trl/trainer/"),
    # transformers 5.23: models/*/modeling_*.py: inside of it, text has no part in what is allocated
    ("vision tower", r"\b(?:visual|vision_tower|vision_model|vision_encoder|visual_encoder|image_encoder)\("
                     r"|, get_(?:image|video)_features:"),
    ("vLLM", r"/vllm/"),
    ("ZeRO-3", r"/zero/(?:stage3|partition_param|partitioned_param|parameter_offload)|_zero3_consolidated"),
)  # fmt: skip

_MODEL: Final = re.compile(r"/models/\w+/modeling_(\w+)\.py$")

FRAME: Final = re.compile(r"\bFile \"([^\"\n]{1,400})\", line \d+, in (\S{1,200})")
"""Python's own, wherever in the line."""

# Python's own; IPython 8, 7; Rich; pytest.
_FRAMES: Final = (
    FRAME,
    re.compile(r"^ {0,4}File ((?:[A-Za-z]:)?[^:\n\"]{1,400}):\d+, in ([^\s(]{1,200})\("),
    re.compile(r"^ {0,4}((?:[A-Za-z]:)?[^\s:]{1,400}\.py) in ([^\s(]{1,200})\("),
    re.compile(r"^ {0,4}((?:[A-Za-z]:)?[^:\n]{1,400}\.py):\d+:? in (\S{1,200})"),
)
_BEGUN: Final = re.compile(r"^ {0,4}(?:[/~]|[A-Za-z]:\\)[^\s:]{0,400}(?::\d{1,6}:? in)?\s{0,200}$")
"""What Rich leaves of a frame's line that is too long for its box; it goes on in the next."""
_WARNED: Final = re.compile(r"(?:^|\s)([^\s:\"]{1,400}\.py):\d{1,6}: (\w{0,40}Warning): ([^\n]{0,80})")
_NOT_CLONED: Final = re.compile(r"Failed to clone\(\) tensor|\bmanaged by FSDP\.")
"""Words of a warning that quotes the error (torch: torch/distributed/fsdp/_state_dict_utils.py; before 2.0
fully_sharded_data_parallel.py). Loggers and posts omit the file before it."""

_CURRENT: Final = re.compile(r"^ {0,4}(?:-{1,8}> ?\d+|❱ ?\d+ ?│?)([^\n]{0,400})")
"""The line that IPython and Rich mark among those that they show around it."""

_CARETS: Final = re.compile(r"^[\s~^]*$")


_FOREIGN: Final = 6
"""Lines of others that may stand between two frames of a traceback, or between the last one and the message."""

_GONE_ON: Final = 60
"""So many lines after a traceback, another message is not its own: the error was caught, and the job went on."""


def trace(lines: Iterable[str]) -> Traced:
    """What the last traceback in `lines` (without prefixes) shows, or the frames directly above the message where its
    first line is missing; an empty `Traced` without any."""
    kept = _last_traceback(_unwrapped(list(lines)))
    if not kept:
        return Traced()
    slashed = [line.replace("\\", "/") for line in kept]
    phase = next((phase for phase, sign in _PHASES if any(sign.search(line) for line in slashed)), None)
    frames = list(_frames(kept))
    text = "\n".join(frames)
    in_use = frozenset(feature for feature, sign in _FEATURES if re.search(sign, text))
    heads = (frame.partition(", ") for frame in frames)
    script = script_of_frames([(file, rest.partition(":")[0]) for file, _, rest in heads])
    models = [found[1] for frame in frames if (found := _MODEL.search(frame.partition(", ")[0])) is not None]
    model_type = models[0] if models else None  # the whole model, not a tower in it
    for frame in reversed(frames):
        for place, library, sign in _PLACES:
            if re.search(sign, frame) and not (place == "predictions of an evaluation" and phase != "evaluate"):
                return Traced(phase, place, library, _short(frame), model_type, in_use, script)
    return Traced(phase, in_use=in_use, model_type=model_type, script=script)


def warned(line: str) -> Traced | None:
    """What a warning shows that quotes an error it caught, by the file that warned; None if `line` has none."""
    if (found := _WARNED.search(line)) is not None:
        file, category, words = found.groups()
    elif (found := _NOT_CLONED.search(line)) is not None:
        file, category, words = "/site-packages/torch/distributed/fsdp/_state_dict_utils.py", "UserWarning", found[0]
    else:
        return None
    return trace([BEGINS, f'File "{file}", line 0, in {category}', f"    {words}", ""])


# Page-locked RAM: torch's pin_memory, whoever calls it, and a copy to RAM that does not wait, whose target torch pins
# (torch: aten/src/ATen/native/cuda/Copy.cu).
_PINS: Final = re.compile(
    r"\.pin_memory\(|\bpin_memory=True|, _?pin_memory\b|\.to\([^\n]{0,60}cpu[^\n]{0,60}non_blocking ?= ?True"
)


def pins(lines: Iterable[str]) -> bool:
    """Whether one of the two innermost frames of the last traceback in `lines` allocates page-locked RAM."""
    return any(_PINS.search(frame) for frame in list(_frames(_last_traceback(list(lines))))[-2:])


def _unwrapped(lines: list[str]) -> list[str]:
    """The lines, with the frames that Rich wrapped on one each."""
    found: list[str] = []
    for line in lines:
        if found and line.strip() and _BEGUN.match(found[-1]) is not None:
            begun, rest = found[-1].rstrip(), line.strip()
            joined = f"{begun} {rest}" if begun.endswith(" in") else begun + rest
            if _frame_in(joined) is not None or _BEGUN.match(joined) is not None:
                found[-1] = joined
                continue
        found.append(line)
    return found


def _last_traceback(lines: list[str]) -> list[str]:
    begins = next((place for place in range(len(lines) - 1, -1, -1) if BEGINS in lines[place]), None)
    if begins is not None:
        frames = [place for place in range(begins, len(lines)) if _frame_in(lines[place]) is not None]
        return lines[begins:] if len(lines) - (frames or [begins])[-1] <= _GONE_ON else []
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


# What programs print while they work. In this order: datasets' "Saving the dataset" is no save of a model. The words
# are those of transformers 4.3x to 5.23 (trainer.py, modeling_utils.py, core_model_loading.py), datasets 3 and 4
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
    """What the job was doing by the last of `lines` that tells it: a progress bar, or what a library prints."""
    for line in reversed(lines):
        for phase, sign in _PROGRESS:
            if sign.search(line):
                # After data comes anything; weights that have just been loaded are still what fills the memory.
                return None if phase == "data" and _ENDED.search(line) else phase
    return None


def _frames(lines: list[str]) -> Iterator[str]:
    """`"FILE, FUNCTION: SOURCE"` of each frame, the innermost last."""
    head, source, marked = "", "", False
    for line in lines:
        found = _frame_in(line)
        if found is not None:
            if head:
                yield f"{head}: {source}"
            # IPython writes Class.function
            head, source = f"{found[1]}, {found[2].rpartition('.')[2]}".replace("\\", "/"), ""
            marked = found.re is not _FRAMES[0]
        elif marked and (current := _CURRENT.match(line)) is not None:
            source = " ".join(current[1].replace("│", " ").split())
        elif head and not marked and line.startswith(" ") and not _CARETS.match(line):
            source = f"{source} {' '.join(line.split())}".strip()[:400]
    if head:
        yield f"{head}: {source}"


def _short(frame: str) -> str:
    """From the library's own folder on: no path of the user's machine."""
    file, comma, rest = frame.partition(", ")
    folder = re.split(r"/(?:site|dist)-packages/", file)[-1]
    shown = rest.removesuffix(": ")  # no source
    return "/".join(folder.split("/")[-3:] if folder == file else [folder]) + comma + shown + "…)" * rest.endswith("(")
