"""Evaluating and saving: metrics that are never computed, logits held for nothing, checkpoints without weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog import fit
from hf_memkit.catalog.checkpoint_names import saved_under_other_names
from hf_memkit.checks.fsdp_settings import fsdp_of
from hf_memkit.checks.rule import Match, any_job, deepspeed
from hf_memkit.checks.subject import Subject
from hf_memkit.common.units import format_size
from hf_memkit.setup.techniques.registry import setting_of

_FOR_METRICS: Final = ("inputs", "loss")


@any_job.warning(
    why="with prediction_loss_only Trainer drops the logits and never calls compute_metrics",
    fix="delete prediction_loss_only, or the metric",
    source="transformers 5.23.0: trainer.py 3285, 2994, 3050",
    techniques=("loss-only-evaluation", "streamed-metrics"),
)
def metrics_never_computed(subject: Subject) -> Iterator[Match]:
    if not subject.on("prediction_loss_only"):
        return
    metric = str(subject.argument("metric_for_best_model") or "loss")
    if subject.on("batch_eval_metrics"):
        yield Match("batch_eval_metrics", True, argument=True)
    elif metric.removeprefix("eval_") != "loss" and "loss" not in metric:
        # Trainer stops at the first evaluation, whose metrics lack it.
        yield Match("metric_for_best_model", metric, argument=True, severity="error")


@any_job.warning(
    why="with batch_eval_metrics Trainer keeps nothing that it could move, and ignores eval_accumulation_steps",
    fix="delete eval_accumulation_steps",
    source="transformers 5.23.0: trainer.py 2993, 3009 (elif)",
    techniques=("eval-accumulation", "streamed-metrics"),
)
def eval_accumulation_ignored(subject: Subject) -> Iterator[Match]:
    steps = subject.argument("eval_accumulation_steps")
    if steps is not None and subject.on("batch_eval_metrics"):
        yield Match("eval_accumulation_steps", steps, argument=True)


@any_job.warning(
    why="there are no logits to move, only losses of 4 bytes a sample; Trainer still empties the allocator's cache",
    fix="delete eval_accumulation_steps",
    source="transformers 5.23.0: trainer.py 3009-3016, 3285",
    techniques=("eval-accumulation", "loss-only-evaluation"),
)
def eval_accumulation_without_logits(subject: Subject) -> Iterator[Match]:
    steps = subject.argument("eval_accumulation_steps")
    if steps is not None and subject.on("prediction_loss_only") and not subject.on("batch_eval_metrics"):
        yield Match("eval_accumulation_steps", steps, argument=True)


@any_job.warning(
    why="compute_metrics silently receives nothing of this name",
    fix="write inputs or loss",
    source="transformers 5.23.0: trainer.py 2953-2954, 2996-2997",
)
def metric_input_unknown(subject: Subject) -> Iterator[Match]:
    for name in _names(subject):
        if name not in _FOR_METRICS:
            yield Match("include_for_metrics", name, argument=True)


@any_job.warning(
    why="Trainer gathers and holds the inputs of the whole evaluation set, although it computes no metric",
    fix="delete include_for_metrics",
    source="transformers 5.23.0: trainer.py 2952-2969",
    techniques=("loss-only-evaluation",),
)
def inputs_held_for_nothing(subject: Subject) -> Iterator[Match]:
    if "inputs" in _names(subject) and subject.on("prediction_loss_only"):
        yield Match("include_for_metrics", argument=True)


def _names(subject: Subject) -> list[str]:
    value: Any = subject.argument("include_for_metrics") or []
    return [value] if isinstance(value, str) else list(value)


@any_job.warning(
    why="predict() must return the logits of the whole test set and keeps them, even with batch_eval_metrics",
    fix="call evaluate() on the test set, or give Trainer a preprocess_logits_for_metrics that shrinks the logits",
    source='transformers 5.23.0: trainer.py 2968, 2978, 2983 (description == "Prediction")',
    techniques=("streamed-metrics",),
)
def predict_keeps_everything(subject: Subject) -> Iterator[Match]:
    streamed = subject.on("batch_eval_metrics") and subject.on("do_predict")
    # memkit's own part makes a token id of a row of logits.
    if streamed and not subject.has_setting("trainer_parts.streamed_metrics"):
        yield Match("batch_eval_metrics", True, argument=True)


@any_job.warning(
    why="no effect during training; an evaluate() outside train() rounds the weights to 16 bits in place, and later "
    "saves and training have 16 bits",
    fix=f"delete it: with {setting_of('bf16-autocast')} or {setting_of('fp16-autocast')} evaluation uses autocast "
    "anyway",
    source="transformers 5.23.0: trainer.py 2939-2945",
    techniques=("bf16-autocast", "fp16-autocast", "fp32"),
)
def full_eval_while_training(subject: Subject) -> Iterator[Match]:
    strategy = str(subject.argument("eval_strategy", "no")).lower()
    for name in ("bf16_full_eval", "fp16_full_eval"):
        # With DeepSpeed the argument says which type the engine computes in.
        if subject.on(name) and strategy in ("steps", "epoch") and subject.config is None:
            yield Match(name, True, argument=True)


@any_job.warning(
    why="prediction_loss_only computes only the loss: nothing is generated",
    fix="delete prediction_loss_only, or predict_with_generate",
    source="transformers 5.23.0: trainer_seq2seq.py, prediction_step",
    techniques=("loss-only-evaluation",),
)
def generation_skipped(subject: Subject) -> Iterator[Match]:
    if subject.on("predict_with_generate") and subject.on("prediction_loss_only"):
        yield Match("predict_with_generate", True, argument=True)


@any_job.warning(
    why="evaluations generate only with predict_with_generate: true",
    fix="add predict_with_generate: true, or delete it",
    source="transformers 5.23.0: trainer_seq2seq.py, prediction_step",
)
def generation_not_asked_for(subject: Subject) -> Iterator[Match]:
    for name in ("generation_num_beams", "generation_max_length"):
        value = subject.argument(name)
        if value is not None and not subject.on("predict_with_generate"):
            yield Match(name, value, argument=True)


@any_job.error(
    why="keys and values of all beams do not fit on the GPU",
    fix="lower generation_num_beams or per_device_eval_batch_size",
    source="2 × 2 bytes × batch × beams × tokens × layers × heads × head width; transformers 5.23.0: "
    "generation/utils.py, expand_size",
)
def generation_cache_too_large(subject: Subject) -> Iterator[Match]:
    model, gpu = subject.model, subject.gpu
    tokens = subject.argument("generation_max_length")
    generates = subject.on("predict_with_generate")
    if model is None or gpu is None or not isinstance(tokens, int) or not generates:
        return

    beams = subject.argument("generation_num_beams") or 1
    batch = subject.argument("per_device_eval_batch_size", 8)
    size = cache_bytes(
        model.config, batch=int(batch), beams=int(beams), tokens=tokens, layers=model.layers, width=model.width
    )
    if fit.too_small(gpu, size):
        key = "generation_num_beams" if beams != 1 else "generation_max_length"
        cache = f"{batch} samples × {beams} beams × {tokens} tokens take {format_size(size)} of keys and values"
        why = f"{cache}; {gpu.name} has {format_size(gpu.usable_bytes)} available"
        yield Match(key, why=why, argument=True)


def cache_bytes(
    config: Mapping[str, Any], *, batch: int, beams: int, tokens: int, layers: int, width: int, number_bytes: int = 2
) -> int:
    """Bytes of the keys and values that generation keeps at its last token, `number_bytes` each. Each beam has its own
    cache (transformers 5.23.0: generation/utils.py, `expand_size=generation_config.num_beams`), and reordering
    beams copies one layer's share on top. Without head counts in `config` all of `width` is kept."""
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    head_width = int(config.get("head_dim") or width // heads)
    kept = int(config.get("num_key_value_heads") or heads)  # grouped-query models have fewer
    return 2 * number_bytes * batch * beams * tokens * layers * kept * head_width


_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
_OLD = "zero_optimization.stage3_gather_fp16_weights_on_model_save"


@deepspeed.warning(
    why="without it save_model() and checkpoints at stage 3 contain no model weights, only DeepSpeed's shards, which "
    "zero_to_fp32.py merges",
    fix='write "stage3_gather_16bit_weights_on_model_save": true',
    source="transformers 5.23.0: trainer.py 4113-4123; deepspeed 0.19.8: runtime/zero/config.py 257",
)
def no_weights_saved(subject: Subject) -> Iterator[Match]:
    names = (_GATHER, _GATHER.replace("stage3_", ""), _OLD)  # deepspeed takes all three
    if subject.zero.stage == 3 and not any(subject.at(name) is True for name in names):
        why = 'accelerate uses false for "auto": save_model() and checkpoints at stage 3 contain no model weights'
        yield Match(_GATHER, why=why if subject.at(_GATHER) == "auto" else "")


@any_job.error(
    why="under DeepSpeed and FSDP Trainer rejects save_only_model together with load_best_model_at_end",
    fix="set one of the two to false",
    source="transformers 5.23.0: trainer.py 889-896",
)
def best_model_without_states(subject: Subject) -> Iterator[Match]:
    sharded = subject.config is not None or fsdp_of(subject) is not None
    if sharded and subject.on("save_only_model") and subject.on("load_best_model_at_end"):
        yield Match("save_only_model", True, argument=True)


@deepspeed.error(
    why='below stage 3 Trainer cannot evaluate without training: "ZeRO inference only makes sense with ZeRO Stage 3"',
    fix="remove DeepSpeed for evaluation, or set the stage to 3",
    source="transformers 5.23.0: integrations/deepspeed.py 649",
)
def evaluation_only(subject: Subject) -> Iterator[Match]:
    asked = subject.on("do_eval") or subject.on("do_predict")
    if asked and subject.argument("do_train") is False and subject.zero.stage != 3:
        yield Match("do_train", False, argument=True)


@deepspeed.error(
    why="on a CPU the gathered weights share the swap buffers' memory: save_model() fails on shared tensors, or "
    "saves wrong weights",
    fix="train on a GPU, keep the parameters off NVMe, or use a recipe, which corrects this",
    source="deepspeed 0.19.8: runtime/engine.py 5675, `param.detach().cpu()`, which copies from a GPU only",
)
def gather_from_nvme_on_cpu(subject: Subject) -> Iterator[Match]:
    own_script = bool(subject.arguments_file)  # a recipe's run fixes it: hf_memkit/deepspeed/wiring.py
    on_cpu = subject.on("use_cpu")
    if own_script and on_cpu and subject.zero.swaps_parameters and subject.at(_GATHER) is True:
        yield Match(_GATHER, True)


@deepspeed.warning(
    why="with the optimizer on NVMe a resume silently loses Adam's moments and the master weights of biases and norms",
    fix="add the callback hf_memkit.deepspeed.nvme_resume.RestoreSwappedStates, which restores them; "
    "recipes include it",
    source="deepspeed 0.19.8: runtime/engine.py 4469-4482: it copies files that the new optimizer has no state for",
)
def resume_from_nvme(subject: Subject) -> Iterator[Match]:
    asked = subject.argument("resume_from_checkpoint")
    if asked and subject.zero.swaps_optimizer:
        yield Match("resume_from_checkpoint", asked, argument=True)


@any_job.error(
    why="transformers saves weights of this architecture under other names than Trainer reads: it silently goes on "
    "with the values that these weights had before (transformers issue 43701)",
    fix="load the model with from_pretrained from the checkpoint",
    source="transformers 5.23.0: trainer.py 3695, 3824: load_state_dict(state_dict, False); modeling_utils.py 3532",
)
def weights_not_restored(subject: Subject) -> Iterator[Match]:
    resumes, best = subject.argument("resume_from_checkpoint"), subject.on("load_best_model_at_end")
    if not (resumes or best) or subject.config is not None or fsdp_of(subject) is not None or subject.adapter:
        return
    by_memkit = subject.has_setting("data.task") or subject.setting("trainer.restores_all_weights")
    if by_memkit or not saved_under_other_names(subject.config_of_model):
        return
    names = (subject.argument("model_name_or_path"), subject.setting("model.name"))
    loaded_from = [Path(name) for name in names if isinstance(name, str)]
    newest = resumes is True and any(path.name.startswith("checkpoint-") for path in loaded_from)
    if resumes and not newest and Path(str(resumes)) not in loaded_from:
        fix = "set model_name_or_path to the checkpoint too, or load the model from it before you make the Trainer"
        yield Match("resume_from_checkpoint", resumes, fix=fix, argument=True)
    if best:
        fix = (
            "set it to false and metric_for_best_model: loss, and after train() load the model with from_pretrained("
            "trainer.state.best_model_checkpoint)"
        )
        yield Match("load_best_model_at_end", True, fix=fix, argument=True)
