"""Proofs about evaluation: what real Trainers hold, move and leave out."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers.trainer as trainer_module
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)
from transformers.trainer_pt_utils import EvalLoopContainer

from hf_memkit.checks.rules.evaluation import cache_bytes
from tests.checks.plain import plain_proof
from tests.checks.real import arguments, model, refused, rows


class Counted:
    """What EvalLoopContainer was given, and how often it moved what it holds, inside a `with`."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.moves = 0
        self._class = EvalLoopContainer
        self._real = (EvalLoopContainer.add, EvalLoopContainer.to_cpu_and_numpy)

    def __enter__(self) -> Counted:
        add, move = self._real

        def counted_add(container: Any, tensors: Any) -> None:
            self.shapes.append(tuple(tensors.shape))
            add(container, tensors)

        def counted_move(container: Any) -> None:
            self.moves += container.tensors is not None
            move(container)

        self._class.add, self._class.to_cpu_and_numpy = counted_add, counted_move
        return self

    def __exit__(self, *_: object) -> None:
        self._class.add, self._class.to_cpu_and_numpy = self._real


def evaluator(metric: Any = None, **more: Any) -> Trainer:
    set_seed(0)
    return Trainer(
        model=model(), args=arguments(None, per_device_eval_batch_size=2, **more), train_dataset=rows(),
        eval_dataset=rows(8), compute_metrics=metric,
    )  # fmt: skip


def batched(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
    return {"seen": 1.0}


@plain_proof("metrics-never-computed", fails="silent")
def metrics_never_computed() -> None:
    assert "eval_seen" in evaluator(batched).evaluate()
    for more in ({}, {"batch_eval_metrics": True}):
        assert "eval_seen" not in evaluator(batched, prediction_loss_only=True, **more).evaluate()
    best = {"metric_for_best_model": "seen", "load_best_model_at_end": True, "save_strategy": "steps",
            "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}  # fmt: skip
    refused("eval_seen", lambda: evaluator(batched, prediction_loss_only=True, **best).train())


@plain_proof("eval-accumulation-ignored", fails="silent")
def eval_accumulation_ignored() -> None:
    with Counted() as plain:
        evaluator(batched, eval_accumulation_steps=1).evaluate()
    with Counted() as streamed:
        evaluator(batched, eval_accumulation_steps=1, batch_eval_metrics=True).evaluate()
    assert plain.moves >= 4 * 3  # losses, logits and labels of four batches
    assert streamed.moves == 1  # the losses, once, at the end


@plain_proof("eval-accumulation-without-logits", fails="silent")
def eval_accumulation_without_logits() -> None:
    with Counted() as counted:
        evaluator(batched, eval_accumulation_steps=1, prediction_loss_only=True).evaluate()
    assert counted.moves >= 4 and set(counted.shapes) == {(2,)}
    source = trainer_module.inspect.getsource(Trainer.evaluation_loop)
    assert source.index("args.eval_accumulation_steps is not None") < source.rindex("torch.cuda.empty_cache()")


@plain_proof("metric-input-unknown", fails="silent")
def metric_input_unknown() -> None:
    given: dict[str, bool] = {}

    def metric(prediction: EvalPrediction) -> dict[str, float]:
        given["inputs"] = prediction.inputs is not None
        return {}

    evaluator(metric, include_for_metrics=["input"]).evaluate()
    assert given == {"inputs": False}
    evaluator(metric, include_for_metrics=["inputs"]).evaluate()
    assert given == {"inputs": True}


@plain_proof("weights-not-restored", fails="silent")
def weights_not_restored() -> None:
    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                       image_size=8, patch_size=4)  # fmt: skip
    folder = tempfile.mkdtemp()
    images = [{"pixel_values": torch.ones(3, 8, 8), "labels": number % 2} for number in range(8)]
    options = {"output_dir": folder, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}

    def of_images(model: Any) -> Trainer:
        return Trainer(model, arguments(None, **options), train_dataset=images)

    of_images(ViTForImageClassification(config)).train()
    checkpoint = f"{folder}/checkpoint-1"
    saved = ViTForImageClassification.from_pretrained(checkpoint).state_dict()
    for read in ("_load_from_checkpoint", "_load_best_model"):
        trainer = of_images(ViTForImageClassification(config))
        trainer.state.best_model_checkpoint = checkpoint
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        getattr(trainer, read)(*([checkpoint] if read == "_load_from_checkpoint" else []))
        now = trainer.model.state_dict()
        name = "vit.layers.0.attention.q_proj.weight"
        assert torch.equal(now[name], before[name]) and not torch.equal(now[name], saved[name])
        assert torch.equal(now["classifier.weight"], saved["classifier.weight"])


@plain_proof("inputs-held-for-nothing", fails="silent")
def inputs_held_for_nothing() -> None:
    with Counted() as counted:
        evaluator(None, include_for_metrics=["inputs"], prediction_loss_only=True).evaluate()
    assert counted.shapes.count((2, 16)) == 4


@plain_proof("predict-keeps-everything", fails="silent")
def predict_keeps_everything() -> None:
    with Counted() as evaluated:
        evaluator(batched, batch_eval_metrics=True).evaluate()
    with Counted() as predicted:
        evaluator(batched, batch_eval_metrics=True).predict(rows(8))
    assert (2, 16, 128) not in evaluated.shapes and predicted.shapes.count((2, 16, 128)) == 4


@plain_proof("full-eval-while-training", fails="silent")
def full_eval_while_training() -> None:
    trainer = evaluator(None, bf16_full_eval=True, eval_strategy="steps", eval_steps=1)
    seen: list[torch.dtype] = []
    real = trainer.prediction_step

    def step(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
        seen.append(next(module.parameters()).dtype)
        return real(module, *args, **options)

    trainer.prediction_step = step
    trainer.train()
    assert set(seen) == {torch.float32}
    trainer.evaluate()
    assert next(trainer.model.parameters()).dtype is torch.bfloat16  # and so it would be saved
    trainer = evaluator(None, bf16_full_eval=True, eval_strategy="steps", eval_steps=1)
    trainer.evaluate()
    trainer.train()  # silently in 16 bits
    moments = {state["exp_avg"].dtype for state in trainer.optimizer.state.values()}
    assert trainer.model.dtype is torch.bfloat16 and moments == {torch.bfloat16}


def _generated(**more: Any) -> tuple[int, int]:
    """(calls of generate in an evaluation, beams asked for)."""
    set_seed(0)
    shape = BartConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    made = BartForConditionalGeneration(shape)
    calls: list[int] = []
    real = made.generate

    def generate(*args: Any, **options: Any) -> Any:
        calls.append(options.get("num_beams") or 1)
        return real(*args, **options)

    made.generate = generate
    options = arguments(None).to_dict()
    data = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)} for _ in range(2)]
    args = Seq2SeqTrainingArguments(
        output_dir=options["output_dir"], use_cpu=True, report_to="none", generation_max_length=8, disable_tqdm=True,
        **more,
    )  # fmt: skip
    Seq2SeqTrainer(model=made, args=args, eval_dataset=data, compute_metrics=lambda _: {}).evaluate()
    return len(calls), max(calls, default=0)


@plain_proof("generation-skipped", fails="silent")
def generation_skipped() -> None:
    assert _generated(predict_with_generate=True, generation_num_beams=3) == (1, 3)
    assert _generated(predict_with_generate=True, prediction_loss_only=True) == (0, 0)


@plain_proof("generation-not-asked-for", fails="silent")
def generation_not_asked_for() -> None:
    assert _generated(generation_num_beams=3) == (0, 0)


@plain_proof("generation-cache-too-large", fails="unshown")
def generation_cache_too_large() -> None:
    set_seed(0)
    from transformers import GPT2Config

    shape = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0)
    made = AutoModelForCausalLM.from_config(shape).eval()
    prompt = torch.arange(1, 5)[None].repeat(2, 1)
    done = made.generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=3, min_new_tokens=8, max_new_tokens=8,
        pad_token_id=0, do_sample=False, return_dict_in_generate=True,
    )  # fmt: skip
    held = sum(
        tensor.numel() * tensor.element_size()
        for layer in done.past_key_values.layers
        for tensor in (layer.keys, layer.values)
    )
    tokens = 4 + 8 - 1  # the last token is never fed back
    config = {"num_attention_heads": 4}
    assert held == cache_bytes(config, batch=2, beams=3, tokens=tokens, layers=3, width=32, number_bytes=4)
