"""The chunked loss against the loss over all logits: values, gradients, and other uses of a model's logits."""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, GPT2ForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from hf_memkit.components.chunked_loss import install
from hf_memkit.components.chunked_loss_sum import ChunkedSum
from tests.techniques.proving import proves
from tests.techniques.tiny_models import batch, causal_model, summed_in_fp64

TOLERANCE = 1e-6
"""In fp32 the sums are taken in another order, and nothing else differs."""

CHUNK = 7
HAS_TORCH_FORM = hasattr(torch.nn.functional, "linear_cross_entropy")
ENGINES = ["loop", pytest.param("torch", marks=pytest.mark.skipif(not HAS_TORCH_FORM, reason="torch before 2.13"))]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def assert_same(own: Any, chunked: Any, tolerance: float = TOLERANCE, **inputs: Any) -> None:
    """The same loss and the same gradients from both models."""
    with summed_in_fp64():
        expected = own(**inputs)
    actual = chunked(**inputs)
    expected.loss.backward()
    actual.loss.backward()
    assert actual.logits is None and expected.logits is not None
    torch.testing.assert_close(actual.loss, expected.loss, rtol=0, atol=tolerance, check_dtype=False)
    theirs, ours = gradients(own), gradients(chunked)
    assert ours.keys() == theirs.keys() and len(ours) > 0
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def pair(model: Any, **options: Any) -> tuple[Any, Any]:
    own, chunked = copy.deepcopy(model), copy.deepcopy(model)
    install(chunked, **{"chunk_tokens": CHUNK, **options})
    return own, chunked


@proves("same-result", "chunked-loss")
@pytest.mark.parametrize("items", [None, 31, torch.tensor(31)])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_loss_and_gradients_are_those_over_all_logits(model_type: str, engine: str, items: Any) -> None:
    own, chunked = pair(causal_model(model_type), engine=engine)
    assert_same(own, chunked, **batch(), **({} if items is None else {"num_items_in_batch": items}))


@pytest.mark.parametrize("model_type", ["gemma2", "cohere", "granite", "phi", "mixtral"])
def test_scaled_capped_and_biased_logits(model_type: str) -> None:
    model = causal_model(model_type)
    own, chunked = pair(model)
    assert_same(own, chunked, **batch())
    if model_type in ("gemma2", "cohere", "granite"):  # what the model does to its logits matters
        with torch.no_grad():
            logits = model.lm_head(model.model(input_ids=batch()["input_ids"]).last_hidden_state)
            plain = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch()["labels"][:, 1:].flatten())
            assert abs(float(plain) - float(own(**batch()).loss)) > 1e-3


def test_shifted_labels_and_nothing_to_learn() -> None:
    own, chunked = pair(causal_model())
    inputs = batch()
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    assert_same(own, chunked, **inputs, shift_labels=shifted)
    nothing = torch.full_like(inputs["labels"], -100)
    assert chunked(input_ids=inputs["input_ids"], labels=nothing).loss.isnan()  # as transformers' own mean over none
    assert own(input_ids=inputs["input_ids"], labels=nothing).loss.isnan()
    assert float(chunked(input_ids=inputs["input_ids"], labels=nothing, num_items_in_batch=5).loss) == 0.0


@pytest.mark.parametrize("items", [None, 31])
def test_label_smoothing_is_trainers(items: int | None) -> None:
    own, chunked = pair(causal_model(), label_smoothing=0.1)
    inputs = batch()
    output = own(input_ids=inputs["input_ids"])
    expected = LabelSmoother(epsilon=0.1)(output, inputs["labels"], shift_labels=True, num_items_in_batch=items)
    expected.backward()
    actual = chunked(**inputs, num_items_in_batch=items).loss
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    for name, value in gradients(own).items():
        torch.testing.assert_close(gradients(chunked)[name], value, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["c_attn"]},
        {"target_modules": ["c_attn", "lm_head"]},
        {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]},
    ],
    ids=["frozen head", "adapter on the head", "head trained whole"],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:Model has `tie_word_embeddings")
def test_adapters(options: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **options)
    own, chunked = pair(get_peft_model(causal_model(), config))
    assert_same(own, chunked, **batch())


def test_sixteen_bits_give_a_loss_in_32() -> None:
    """The output embedding's gradient is rounded to bf16 (2**-8) once a chunk instead of once."""
    own, chunked = pair(causal_model("llama").bfloat16())
    assert_same(own, chunked, tolerance=2**-8, **batch())
    assert chunked(**batch()).loss.dtype is torch.float32
    own, chunked = pair(causal_model())
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(own, chunked, tolerance=2**-8, **batch())
    with pytest.raises(ValueError, match="16-bit loss" if HAS_TORCH_FORM else ""):
        install(causal_model("llama").bfloat16(), engine="torch")


def test_a_tuple_keeps_its_places() -> None:
    own, chunked = pair(causal_model())
    expected, actual = own(**batch(), return_dict=False), chunked(**batch(), return_dict=False)
    assert len(expected) == len(actual)
    assert actual[1] is None and abs(float(actual[0]) - float(expected[0])) < TOLERANCE


def test_an_evaluation_makes_logits_only_for_those_who_look(monkeypatch: pytest.MonkeyPatch) -> None:
    own, chunked = pair(causal_model().eval())
    rows: list[int] = []
    head, linear = chunked.lm_head, torch.nn.functional.linear

    def counting(value: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        if weight is head.weight:
            rows.append(value.shape[:-1].numel())
        return linear(value, weight, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    with torch.no_grad():
        expected, actual = own(**batch()), chunked(**batch())
        assert max(rows, default=0) <= CHUNK  # nothing made all of them yet
        assert actual.logits.shape == expected.logits.shape and isinstance(actual.logits, torch.Tensor)
        torch.testing.assert_close(actual.logits.detach(), expected.logits, rtol=0, atol=0)
        assert torch.equal(actual.logits.argmax(-1), expected.logits.argmax(-1))
        torch.testing.assert_close(actual.loss, expected.loss, rtol=0, atol=TOLERANCE)
    assert sum(count > CHUNK for count in rows) == 1  # made once
    prompt = batch()["input_ids"][:1, :4]
    assert torch.equal(
        chunked.generate(prompt, max_new_tokens=4, do_sample=False),
        own.generate(prompt, max_new_tokens=4, do_sample=False),
    )


def rows_of(count: int) -> list[dict[str, torch.Tensor]]:
    tokens = batch(count, 12, ignored=False)["input_ids"]
    rows = [{"input_ids": row, "labels": row.clone()} for row in tokens]
    for index, row in enumerate(rows):
        row["labels"][: index % 7] = -100
    return rows


def train(folder: Path, part: Callable[[Any], Any] | None, **more: Any) -> tuple[list[float], dict[str, float], float]:
    """Losses, what an evaluation gives, and the sum of all weights after two steps of three micro-batches."""
    model = causal_model()
    if part is not None:
        part(model)
    metrics = more.pop("compute_metrics", None)
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=2, logging_steps=1,
        per_device_train_batch_size=2, gradient_accumulation_steps=3, save_strategy="no", **more,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows_of(16), eval_dataset=rows_of(5), compute_metrics=metrics
    )
    trainer.train()
    evaluated = trainer.evaluate()
    # As Trainer does before it saves: accelerate peels off what it put around forward, and must leave the part.
    trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    if part is not None:
        assert model.train()(**batch()).logits is None
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, evaluated, float(sum(value.detach().sum() for value in model.parameters()))


@pytest.mark.slow
@proves("same-result", "chunked-loss")
def test_a_training_with_accumulation_and_its_evaluation(tmp_path: Path) -> None:
    def part(model: Any) -> Any:
        return install(model, chunk_tokens=CHUNK)

    def accuracy(prediction: Any) -> dict[str, float]:
        made = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        return {"mean": float(made.mean())}

    plain = train(tmp_path / "plain", None, compute_metrics=accuracy)
    chunked = train(tmp_path / "chunked", part, compute_metrics=accuracy)
    assert chunked[0] == pytest.approx(plain[0], abs=2e-6)  # Trainer prints the sum of three micro-batches' losses
    for name in ("eval_loss", "eval_mean"):
        assert chunked[1][name] == pytest.approx(plain[1][name], abs=2e-6)
    assert chunked[2] == pytest.approx(plain[2], abs=1e-4)  # a sum over 28 thousand weights
    loss_only = train(tmp_path / "loss-only", part)
    assert loss_only[1]["eval_loss"] == pytest.approx(plain[1]["eval_loss"], abs=2e-6)
    mixed = train(tmp_path / "mixed", part, bf16=True)
    assert mixed[0] == pytest.approx(plain[0], abs=2**-8)


@pytest.mark.slow
def test_compiled() -> None:
    own, chunked = pair(causal_model())
    compiled = torch.compile(chunked, backend="eager")
    actual, expected = compiled(**batch()).loss, own(**batch()).loss
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
    actual.backward()
    expected.backward()
    torch.testing.assert_close(
        chunked.transformer.wte.weight.grad, own.transformer.wte.weight.grad, rtol=0, atol=TOLERANCE
    )
    torch.compiler.reset()


def test_ligers_kernel_is_called_by_uncompiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, its loss is wrong or an error."""
    compiled: list[bool] = []

    class Loss:
        def __init__(self, **options: Any) -> None:
            pass

        def __call__(self, weight: torch.Tensor, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
            compiled.append(torch.compiler.is_compiling())
            return (hidden @ weight.T).sum()

    package = types.ModuleType("liger_kernel.transformers")
    package.LigerFusedLinearCrossEntropyLoss = Loss  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr(ChunkedSum, "engine_for", lambda *_: "liger")
    sums = ChunkedSum(torch.nn.Linear(4, 8), None, 0.0, "liger")
    torch.compile(sums, backend="eager")(torch.ones(3, 4), torch.arange(3), (), -100)
    torch.compiler.reset()
    assert compiled == [False]


def test_undone_it_leaves_nothing() -> None:
    model = causal_model()
    before = [dict(module.__dict__) for module in (model, model.lm_head)]
    undo = install(model)
    assert [module.__dict__.keys() for module in (model, model.lm_head)] != [kept.keys() for kept in before]
    undo()
    assert [module.__dict__.keys() for module in (model, model.lm_head)] == [kept.keys() for kept in before]
    assert model(**batch()).logits is not None


def test_copies_of_data_parallel_are_refused() -> None:
    """nn.DataParallel needs two GPUs; what it copies a module with does not."""
    assert "module._replicate_for_data_parallel()" in inspect.getsource(torch.nn.parallel.replicate)
    model = causal_model()
    plain = model._replicate_for_data_parallel()
    assert plain.forward.__self__ is plain
    undo = install(model)
    with pytest.raises(RuntimeError, match="torchrun"):
        model._replicate_for_data_parallel()
    del model.__dict__["_replicate_for_data_parallel"]
    # Without the refusal: the copy for the second GPU would run the model on the first GPU.
    assert model._replicate_for_data_parallel().forward.__self__ is model
    undo()
    assert model._replicate_for_data_parallel().forward.__self__ is not model


def test_a_copy_is_a_model_of_its_own() -> None:
    model = causal_model()
    install(model, chunk_tokens=CHUNK)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(0.5)
    plain = causal_model()
    plain.load_state_dict(other.state_dict())
    assert_same(plain, other, **batch())
    assert gradients(model) == {}


class Centred(type(causal_model("llama"))):  # type: ignore[misc]
    """A model that does to its logits what no chunk of tokens can repeat without seeing them."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        logits = logits - logits.mean(-1, keepdim=True)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(loss=loss, logits=logits)


def test_models_that_it_is_not_for() -> None:
    bert = BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(TypeError, match="ForCausalLMLoss"):
        install(AutoModelForMaskedLM.from_config(bert))
    with pytest.raises(TypeError, match="output embedding"):
        install(GPT2ForSequenceClassification(causal_model().config))
    with pytest.raises(TypeError, match="Linear"):
        install(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Centred .*\.mean"):
        install(Centred(causal_model("llama").config))
    model = causal_model()
    install(model)
    with pytest.raises(RuntimeError, match="GPT2LMHeadModel"):
        install(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"engine": "fast"}, "engine='fast'"),
        ({"engine": "liger"}, "Liger's kernel needs a CUDA GPU"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        install(causal_model(), **options)


def test_a_loss_of_other_logits_is_refused() -> None:
    model = causal_model("llama")

    class Twice(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            self.lm_head(hidden)
            own = torch.nn.functional.linear(hidden, self.lm_head.weight)
            loss = None if labels is None else self.loss_function(own, labels, self.config.vocab_size)
            from transformers.modeling_outputs import CausalLMOutput

            return CausalLMOutput(loss=loss, logits=own)

    with pytest.raises(ValueError, match="Twice"):
        install(Twice(model.config))


def test_a_chunk_is_recomputed_with_the_dropout_that_it_had() -> None:
    given: list[torch.Tensor] = []

    class Head(torch.nn.Linear):  # as an adapter on the output embedding is
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            given.append(torch.nn.functional.dropout(hidden, 0.5))
            return super().forward(given[-1])

    total = ChunkedSum(Head(16, 8), CHUNK, 0.0, "loop")._loop(
        torch.ones(2 * CHUNK, 16, requires_grad=True), targets=torch.arange(2 * CHUNK) % 8, steps=(),
        ignore_index=-100, chunk=CHUNK,
    )  # fmt: skip
    total.backward()  # type: ignore[no-untyped-call]
    first, second, second_again, first_again = given
    assert torch.equal(first, first_again) and torch.equal(second, second_again)
