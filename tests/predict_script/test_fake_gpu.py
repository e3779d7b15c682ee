"""Scripts that ask for a GPU, load to it and attend on it behave as on the GPU that is predicted, without one."""

from __future__ import annotations

import importlib.util
import textwrap
from typing import Final

import pytest

from hf_memkit.prediction.traced_training import Outcome, Untrained
from tests.predict_script.conftest import Predict

pytestmark = pytest.mark.tracing

MODEL: Final = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

def model(heads=4, layers=2, **options):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=heads, **options))

def rows(picked):
    ids = torch.arange(128).remainder(64).repeat(len(picked), 1)
    return {"input_ids": ids, "labels": ids}

def train(model, collator=rows, **options):
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=4, max_steps=2, report_to="none", save_strategy="no", bf16=True, **options)
    Trainer(model, arguments, train_dataset=[{"x": 1}] * 8, data_collator=collator).train()
"""


@pytest.fixture
def run(predict: Predict) -> Predict:
    """The outcome of a script, on an A100 unless another capability is given."""

    def ran(text: str, capability: tuple[int, int] = (8, 0)) -> Outcome:
        return predict(MODEL + textwrap.dedent(text), capability=capability, worst_batch=False)

    return ran


def peak(content: Outcome) -> int:
    assert content.training, content
    return sum(content.training.trace.peak().categories.values())


def ended_well(content: Outcome) -> None:
    assert content == Outcome(untrained=Untrained(None)), content


@pytest.mark.slow
def test_flash_attention_keeps_what_torchs_own_keeps(run: Predict) -> None:
    """Without the rule the package would be missing, or every score be kept."""
    text = "made = model(attn_implementation='{0}')\nassert made.config._attn_implementation == '{0}'\ntrain(made)"
    found = [run(text.format(name)) for name in ("sdpa", "flash_attention_2")]
    torchs, packages = map(peak, found)
    assert packages == pytest.approx(torchs, rel=0.02)
    noted = [any("not installed here" in note for note in each.training.notes) for each in found]
    assert noted == [False, importlib.util.find_spec("flash_attn") is None]


@pytest.mark.slow
def test_padding_is_taken_out_for_flash_attention(run: Predict) -> None:
    """Were padded rows attended whole, what is kept would not depend on how much of them is padding."""
    text = """
    def padded(picked):
        mask = torch.ones(len(picked), 128, dtype=torch.long)
        mask[:, {0}:] = 0
        return {{**rows(picked), "attention_mask": mask}}
    train(model(attn_implementation="flash_attention_2"), padded)
    """
    kinds = []
    for length in (32, 120):
        trace = run(text.format(length)).training.trace
        made = {
            size
            for size, operation in zip(trace.sizes_bytes, trace.operation_of, strict=True)
            if "_flash_attention_forward" in trace.operations[operation]
        }
        assert 4 * length * 64 * 2 in made  # output: tokens that are none of padding, 16 bits
        kinds.append(made)
    assert kinds[0] != kinds[1]


@pytest.mark.slow
def test_sequences_in_one_row_train_with_flash_attention(run: Predict) -> None:
    """TRL's packing gives their lengths; a kernel without a rule for them would stop the trace."""
    content = run("""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer
    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    data = Dataset.from_list([{"input_ids": [2] * length} for length in (40, 50, 60, 30) * 4])
    SFTTrainer(
        model(attn_implementation="flash_attention_2"),
        SFTConfig("out", packing=True, max_length=128, max_steps=2, report_to="none", save_strategy="no", bf16=True),
        train_dataset=data,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>"),
    ).train()
    """)
    assert peak(content) > 0
    assert any("_flash_attention_backward" in name for name in content.training.trace.operations)


def test_flash_attention_is_refused_on_a_gpu_that_it_has_no_kernels_for(run: Predict) -> None:
    """A T4 would be predicted to train with what its owner cannot run."""
    content = run("train(model(attn_implementation='flash_attention_2'))", (7, 5))
    assert "FlashAttention only supports Ampere GPUs or newer" in content.failed.text


@pytest.mark.slow
def test_liger_is_the_same_from_the_arguments_and_from_the_script(run: Predict) -> None:
    """The script's own call patches before the model is made: its kernels must not be launched either."""
    by_argument = peak(run("train(model(), use_liger_kernel=True)"))
    by_script = peak(
        run("""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    apply_liger_kernel_to_llama()
    train(model())
    """)
    )
    assert by_script == pytest.approx(by_argument, rel=0.02)


def test_questions_after_the_gpu_are_answered(run: Predict) -> None:
    """Torch would start CUDA, raise, or abort the process: `torch.Generator("cuda")`, pinned memory, summaries."""
    ended_well(
        run("""
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.accelerator.is_available()
    assert "A100" in torch.cuda.get_device_name(0) and torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1] == 80 * 2**30
    kept = torch.empty(1024, 1024, device="cuda")
    assert torch.cuda.memory_allocated() == 4 * 2**20 == torch.accelerator.memory_allocated()
    assert torch.cuda.max_memory_allocated() >= 4 * 2**20 and torch.cuda.memory_reserved() > 0
    torch.cuda.memory_summary(), torch.cuda.memory_stats()["num_ooms"], torch.cuda.utilization()
    torch.cuda.synchronize(), torch.cuda.empty_cache(), torch.cuda.manual_seed_all(1), torch.cuda.seed()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record(), end.record()
    1 / start.elapsed_time(end)
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert (kept @ kept).dtype is torch.bfloat16
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert torch.randn(3, generator=generator, device="cuda").is_cuda and generator.device.type == "cuda"
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.tensor([1, 2], device="cuda").is_cuda and torch.zeros(2, pin_memory=True).tolist() == [0, 0]
    with torch.device("cuda"):
        assert torch.tensor([1]).is_cuda and torch.nn.Linear(2, 2).weight.is_cuda
    torch.set_default_device("cuda")
    assert torch.zeros(2).is_cuda and torch.get_default_device().type == "cuda"
    torch.set_default_device("cpu")
    assert int(torch.version.cuda.split(".")[0]) >= 12 and torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.matmul.allow_tf32 = True
    """)
    )


@pytest.mark.slow
def test_a_script_may_limit_itself_to_a_part_of_the_gpu(run: Predict) -> None:
    """Would notice: a limit of torch that the verdict leaves out."""
    found = run("""
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert torch.cuda.get_per_process_memory_fraction() == 0.25
    train(model())
    """)
    assert found.training.memory_fraction == 0.25
    assert run("train(model())").training.memory_fraction is None


def test_what_is_loaded_to_the_gpu_is_there(run: Predict) -> None:
    """Storages and safetensors would ask the driver for memory; PEFT loads its adapters by the latter."""
    ended_well(
        run("""
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import load_file, save_file
    torch.save({"weight": torch.ones(3, 3), "step": 7}, "c.pt")
    for place in ("cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda:0"}):
        loaded = torch.load("c.pt", map_location=place)
        assert loaded["weight"].is_cuda and loaded["weight"].shape == (3, 3) and loaded["step"] == 7
    assert torch.load("c.pt", map_location="cpu")["weight"].tolist()[0] == [1, 1, 1]
    torch.nn.Linear(3, 3, bias=False).load_state_dict({"weight": torch.load("c.pt", map_location="cuda")["weight"]})
    made = model(); made.config.save_pretrained("base")
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(made.cuda(), options)
    options.save_pretrained("adapter")
    weights = {name: torch.zeros(tuple(each.shape)) for name, each in get_peft_model_state_dict(adapted).items()}
    save_file(weights, "adapter/adapter_model.safetensors")
    assert all(each.is_cuda for each in load_file("adapter/adapter_model.safetensors", device="cuda").values())
    adapted = PeftModel.from_pretrained(model().cuda(), "adapter", is_trainable=True)
    assert {each.device.type for each in adapted.parameters()} == {"cuda"}
    assert any(each.requires_grad for each in adapted.parameters())
    assert type(adapted.merge_and_unload()).__name__ == "LlamaForCausalLM"
    """)
    )


@pytest.mark.slow
def test_a_model_that_the_script_compiles_is_traced(run: Predict) -> None:
    """Would notice: what it keeps when it runs eager, reported as the memory of the compiled code."""
    compiled = run("train(torch.compile(model(layers=1), backend='aot_eager'))").training
    assert any(note.startswith("compiled by torch") for note in compiled.notes)


def test_a_compiled_function_is_refused(run: Predict) -> None:
    error = run("torch.compile(torch.nn.functional.gelu)(torch.ones(2))").failed
    assert "torch.compile(gelu)" in error.message and error.place.startswith("train.py, line")


@pytest.mark.slow
def test_a_model_is_used_in_inference_mode(run: Predict) -> None:
    """As evaluators do before a training, and in its evaluations: `.to` and `bool` come in one piece there."""
    content = run("""
    @torch.inference_mode()
    def encoded(made):
        ids = torch.ones(2, 8, dtype=torch.long).to(made.device)
        return made(ids, attention_mask=torch.ones_like(ids)).logits
    made = model().to("cuda")
    assert encoded(made).shape == (2, 8, 64) and not encoded(made).requires_grad
    class Own(Trainer):
        def evaluate(self, *args, **options):
            encoded(self.model).float().cpu().numpy().argmax()
            return super().evaluate(*args, **options)
    arguments = TrainingArguments("out", per_device_train_batch_size=4, report_to="none", eval_strategy="epoch")
    Own(made, arguments, train_dataset=[{"x": 1}] * 8, eval_dataset=[{"x": 1}] * 8, data_collator=rows).train()
    """)
    assert peak(content) > 0 and "evaluate" in {phase for _, phase in content.training.trace.marks}


def test_models_are_changed_before_they_train(run: Predict) -> None:
    """Copies, other dtypes, new rows of an embedding and initialisations; one that draws again what is out of bounds
    would never come to an end."""
    content = run("""
    import copy
    made = model().to(torch.device("cuda", 0)).half()
    made.resize_token_embeddings(96)
    assert made.lm_head.weight.shape == (96, 64)
    for each in made.parameters():
        each.data = each.data.float()
    torch.nn.init.trunc_normal_(made.lm_head.weight)
    torch.nn.init.orthogonal_(made.lm_head.weight)
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    weight.sum().backward()
    arrived = []
    weight.register_post_accumulate_grad_hook(lambda each: arrived.append(each is weight))
    weight.data = weight.data.contiguous()  # as 8-bit optimizers do in their step
    assert weight.grad is not None
    weight.sum().backward()
    assert arrived == [True]  # or the gradients of the second step would count as activations
    teacher = copy.deepcopy(made).bfloat16().requires_grad_(False)
    assert {(each.device.type, each.dtype) for each in made.parameters()} == {("cuda", torch.float32)}
    assert teacher.lm_head.weight.dtype is torch.bfloat16 and teacher.lm_head.weight is not made.lm_head.weight
    train(made)
    """)
    assert peak(content) > 0
