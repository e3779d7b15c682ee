"""What the child process replaces in torch, transformers and the operating system: a table, which installs it.

Four parts: when the libraries are loaded, a GPU and what else a script needs above its first line, and from `train()`
on. Within a part a row is installed after those above it; where that matters the row says why. What holds something of
one script's, or comes before this module can be imported, says where it is installed. What is replaced in one object,
a model or a Trainer, is not listed. `tests/predict_script/test_replacements.py` compares the names with what differs
in a process that traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.catalog.optimizers import find_optimizer
from hf_memkit.common.when_imported import when_imported
from hf_memkit.prediction.child.gpu import fake_gpu
from hf_memkit.prediction.child.gpu.attention import install_cuda_attention
from hf_memkit.prediction.child.gpu.cuda_questions import answer_scripts
from hf_memkit.prediction.child.gpu.flash_attn_package import install_flash_attn
from hf_memkit.prediction.child.gpu.loaded_files import files_load_to_gpu
from hf_memkit.prediction.child.gpu.other_ranks import one_of_several
from hf_memkit.prediction.child.gpu.real_and_fake import RealAndFake
from hf_memkit.prediction.child.gpu.saves import write_nothing
from hf_memkit.prediction.child.libraries import library_rules
from hf_memkit.prediction.child.libraries.deepspeed_engine import without_engines
from hf_memkit.prediction.child.libraries.library_rules import is_installed, with_flash_package
from hf_memkit.prediction.child.libraries.pretrained import weights_are_shapes
from hf_memkit.prediction.child.quick_imports import is_loaded
from hf_memkit.prediction.child.script.leaves_nothing import keep_what_was_there, nothing_is_pushed
from hf_memkit.prediction.child.trainer_kinds.generation import answers_are_longest
from hf_memkit.prediction.child.trainer_kinds.sft import head_of_triton
from hf_memkit.prediction.child.trainer_kinds.trl_base import answer_trl
from hf_memkit.prediction.child.training.plan_facts import note_parsers
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.setup_ledger import optimizer_of


@dataclass(frozen=True, slots=True)
class TracedScript:
    """What rows go by: what is asked for, what is fake, and from `train()` on what the script's Trainer uses."""

    request: ScriptRequest
    boundary: RealAndFake
    setup: Setup = field(default_factory=lambda: Setup(preset="script"))

    @property
    def on_gpu(self) -> bool:
        return self.request.device == "cuda"

    def optimizer_is(self, package: str) -> bool:
        """Whether the Trainer's optimizer is of that package, or module."""
        name = optimizer_of(self.setup)
        module = name.partition(":")[0]
        return package in find_optimizer(name).packages or f"{module}.".startswith(f"{package}.")


Install = Callable[[TracedScript], Any]
When = Callable[[TracedScript], bool]


@dataclass(frozen=True, slots=True)
class Replacement:
    """A row.

    Attributes:
        what: names of what is replaced, with a space between two; `*` stands for several.
        why, without: what it does instead; what breaks, or differs, where it is not replaced.
        install: installs it; or the function of which file does.
        when: whether a script needs it; None: every script.
        order: why it stands where it does; empty: the order does not matter.
    """

    what: str
    why: str
    without: str
    install: Install | str
    when: When | None = None
    order: str = ""


def install_replacements(rows: tuple[Replacement, ...], script: TracedScript) -> None:
    """Those that the script needs, from the first row to the last."""
    for row in rows:
        if callable(row.install) and (row.when is None or row.when(script)):
            row.install(script)


LOADED: Final = (
    Replacement(
        "at::getCUDAHooks c10::device_guard_impl_registry",
        "C++ code of torch takes CUDA for there",
        "the first backward pass of fake CUDA tensors aborts the process",
        "cuda_device_guard.py, install",
        order="first: where it fails nothing else is loaded",
    ),
    Replacement(
        "torch.compile",
        "nothing is compiled; torchao's step becomes its bound, and others raise Unmodelled when they run",
        "loads the compiler, and operations inside what it makes are not traced",
        "fake_gpu.py, replace_compiler",
        order="before transformers and accelerate, which compile functions when they are imported",
    ),
    Replacement(
        "functools.lru_cache *.lru_cache torch._library.utils.get_source",
        "caches without limit, and no source lines, while libraries are imported; then put back, but in what took it",
        "loading takes longer: transformers reads the files of its models twice",
        "quick_imports.py, quick_imports",
    ),
    Replacement(
        "datasets transformers.trainer.datasets",
        "is imported when something of it is asked for",
        "every process loads it, though not every script uses it",
        "quick_imports.py, import_late",
        order="before Trainer, which imports it",
    ),
    Replacement(
        "torch._library.simple_registry.find_torch_dispatch_rule torch._C._group_tensors_by_device_and_dtype",
        "answers quicker, and the same",
        "a trace takes longer",
        "fast_fakes.py, quick_dispatch",
        order="before the first operation under a dispatch mode: torch keeps what it finds then",
    ),
    Replacement(
        "transformers.trainer.is_datasets_available accelerate.utils.other.is_deepspeed_available",
        "whether it is imported, not whether it is installed",
        "every case imports both libraries to see that nothing is of theirs",
        "serve.py, _load",
    ),
)
"""By the process from which every case is forked."""

ON_A_GPU: Final = (
    Replacement(
        "torch.cuda.* torch._C._cuda_getCurrentRawStream torch.cuda.amp.common.amp_definitely_not_available "
        "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init "
        "torch._subclasses.fake_tensor.init_gpu_context",
        "one GPU of the capability and memory asked for, on which nothing runs",
        "torch says that there is no GPU: the script stops, or trains on the CPU without autocast",
        lambda script: fake_gpu.one_gpu(
            script.request.capability, script.request.capacity_bytes, script.request.gpu_name
        ),
    ),
    Replacement(
        "torch.nn.functional.scaled_dot_product_attention",
        "the kernel that torch chooses on that GPU",
        "torch chooses one of the CPU's, which keeps other tensors",
        lambda script: install_cuda_attention(script.request.capability),
    ),
    Replacement(
        "flash_attn flash_attn_interface transformers.*.is_flash_attn_* "
        "transformers.integrations.hub_kernels.* transformers.modeling_utils.PreTrainedModel.*flash_attn*",
        "the flash-attn package, by torch's operations; on older GPUs its error",
        "flash_attention_2 is refused where the package is missing, and its kernels read memory that is not there",
        lambda script: install_flash_attn(script.request.capability),
    ),
    Replacement(
        "torch.cuda.* torch.Tensor.record_stream torch.Tensor.pin_memory torch.Tensor.is_pinned",
        "one stream, on which all is done at once; page-locked memory is the host's",
        "torch asks CUDA's driver for streams and events, and raises",
        lambda script: fake_gpu.one_stream(),
    ),
    Replacement(
        "torch.cuda.* torch.accelerator.* torch.version.cuda torch.Generator",
        "memory as the tracer counts it, and what else scripts ask of a GPU",
        "a script that prints its memory starts CUDA, which raises; a generator on the GPU ends the process",
        lambda script: answer_scripts(script.boundary.tracer, script.request.capacity_bytes),
        order="after the GPU, whose answers on memory it replaces: that row has no tracer",
    ),
    Replacement(
        "torch.load safetensors.*safe_open transformers.*.safe_open accelerate.*.safe_open peft.*.safe_open",
        "files are read on the host, and what was meant for the GPU becomes a shape there",
        "torch and safetensors copy to a GPU that is not there",
        lambda script: files_load_to_gpu(),
    ),
    Replacement(
        "transformers.training_args.is_torch_tf32_available",
        "by the GPU's capability",
        "tf32=True is refused: transformers asks a build without CUDA for its CUDA version",
        lambda script: library_rules.tf32_is_available(),
    ),
    Replacement(
        "bitsandbytes.functional.lib",
        "functions that are called by pointer do nothing",
        "axolotl and Unsloth write through addresses of tensors that have no memory",
        lambda script: when_imported("bitsandbytes.functional", library_rules.calls_by_pointer_do_nothing),
    ),
    Replacement(
        "trl.kernels.chunked_logprob.*",
        "TRL's head takes the path of a GPU with Triton, and launches nothing",
        "its path without Triton has larger tiles: another peak",
        lambda script: when_imported("trl.kernels.chunked_logprob", head_of_triton),
        when=lambda script: not is_installed("triton"),
    ),
)
"""Above the first line of a script that trains on a GPU."""

ABOVE_TRAIN: Final = (
    Replacement(
        "transformers.training_args.TrainingArguments.__getattribute__ "
        "transformers.modeling_utils.PreTrainedModel.from_pretrained "
        "transformers.modeling_utils.PreTrainedModel._from_config transformers.trainer.Trainer.__init__ "
        "transformers.trainer.Trainer.train",
        "a plan's fields and options, in the place of the script's",
        "every setup of a plan is traced as the script stands",
        "script_overrides.py, install",
        when=lambda script: script.request.overrides is not None,
        order="before the GPU and all below, which then see the plan's values as if the script had given them",
    ),
    Replacement(
        "transformers.trainer.Trainer.__new__",
        "the first Trainer that is made gets a plan's adapters",
        "adapters of a plan are not traced",
        "adapters.py, adapters_from_its_first_line",
        when=lambda script: script.request.overrides is not None and bool(script.request.overrides.adapter),
    ),
    Replacement(
        "torch.compile",
        "as when the libraries were loaded",
        "where fake CUDA tensors cannot be used, nothing was loaded, and the script's imports load the compiler",
        lambda script: fake_gpu.replace_compiler(),
    ),
    Replacement(
        "torch.nn.modules.module.Module._apply torch.Tensor._make_subclass",
        "a parameter that is moved stays the object that it was; a library's own kind of parameter may be fake",
        "Module.to fails on fake parameters, and optimizers keep the ones from before",
        lambda script: fake_gpu.movable_modules(),
    ),
    Replacement(
        "torch.autograd.grad_mode.inference_mode.__enter__ torch.autograd.grad_mode.inference_mode.__exit__",
        "as no_grad, with the same memory",
        "operations reach the tracer before torch takes them apart, and fake tensors have no rule for them",
        lambda script: fake_gpu.inference_is_no_grad(),
    ),
    Replacement(
        "torch._subclasses.fake_tensor.FakeTensor.__deepcopy__",
        "a fake tensor that remembers its number is copied",
        "accelerate's copy of an optimizer's groups fails (torchao's learning rate)",
        lambda script: library_rules.constants_can_be_copied(),
    ),
    Replacement(
        "torch.tensor",
        "asks fake tensors for their numbers, where they are known",
        "torch reads them past all modes, and fails (Qwen2.5-VL's positions, Liger's backward pass)",
        lambda script: library_rules.tensors_become_numbers(),
    ),
    Replacement(
        "torch._refs._reshape_view_helper",
        "a view that strides do not allow raises RuntimeError, as with real tensors",
        "code that waits for that error ends with ValueError (axolotl)",
        lambda script: library_rules.views_raise_what_real_ones_raise(),
    ),
    Replacement(
        "torch._dynamo.*.get_torch_obj_rule_map",
        "no function has rules for the compiler",
        "the import of the compiler fails: several functions of torch.cuda are one here",
        lambda script: when_imported("torch._dynamo.trace_rules", fake_gpu.no_function_has_rules),
    ),
    Replacement(
        "unsloth_zoo.tokenizer_utils.fix_untrained_tokens",
        "looks at no weight",
        "Unsloth reads the values of the embedding, which has none",
        lambda script: when_imported("unsloth_zoo.tokenizer_utils", library_rules.no_weight_is_looked_at),
    ),
    Replacement(
        "transformers.hf_argparser.HfArgumentParser.parse_args_into_dataclasses "
        "trl.scripts._hf_argparser.HfArgumentParser.parse_args_into_dataclasses",
        "notes that arguments come from the command line",
        "a plan does not know whether its arguments can be given as flags",
        lambda script: note_parsers(),
    ),
    Replacement(
        "transformers.trainer.Trainer.__init__ trl.*.hash_module trl.*._precompute_ref_logps "
        "trl.generation.vllm_generation.* trl.*.is_vllm_available",
        "what TRL's Trainers ask of values before they train (trainer_kinds/trl_base.py)",
        "DPO and KTO compute log-probabilities of all rows; use_vllm asks for vLLM",
        lambda script: answer_trl(),
    ),
    Replacement(
        "transformers.training_args.TrainingArguments.__post_init__",
        "takes a DeepSpeed JSON and starts no engine",
        "accelerate starts process groups and an engine, which wants real memory",
        lambda script: without_engines(),
    ),
    Replacement(
        "torch.distributed.* torch.distributed.distributed_c10d.* torch.cuda.device_count "
        "torch.nn.parallel.DistributedDataParallel accelerate.utils.operations.* "
        "accelerate.data_loader.synchronize_rng_states",
        "the first rank of several; what is sent has arrived",
        "the script waits for ranks that nobody starts",
        lambda script: one_of_several(script.request.processes, script.request.per_node),
        when=lambda script: script.request.processes > 1,
        order="after the GPU, which says that there is one",
    ),
    Replacement(
        "transformers.modeling_utils.get_hf_quantizer transformers.modeling_utils._get_resolved_checkpoint_files "
        "transformers.modeling_utils.PreTrainedModel._load_pretrained_model "
        "transformers.modeling_utils.init_empty_weights transformers.integrations.bitsandbytes.init_empty_weights",
        "from_pretrained reads the config, and parameters are shapes",
        "weights are fetched and read, gigabytes of them",
        lambda script: weights_are_shapes(script.boundary),
    ),
    Replacement(
        "transformers.trainer.Trainer.push_to_hub transformers.utils.hub.PushToHubMixin.push_to_hub",
        "pushes nothing",
        "a prediction writes to the user's account",
        lambda script: nothing_is_pushed(),
    ),
    Replacement(
        "os.remove os.unlink os.mkdir posix.remove posix.unlink posix.mkdir shutil.rmtree",
        "what was there before the prediction stays",
        "a script that begins with an empty folder removes the user's results",
        lambda script: keep_what_was_there(),
    ),
    Replacement(
        "torch.multiprocessing.start_processes torch.multiprocessing.spawn.start_processes "
        "accelerate.launchers.are_libraries_initialized multiprocessing.popen_spawn_posix.Popen._launch "
        "multiprocessing.popen_forkserver.Popen._launch",
        "a training in another process ends the prediction; besides, an audit hook sees programs that start",
        "the script trains for real, in a process in which nothing is replaced",
        "no_real_training.py, no_real_training",
    ),
    Replacement(
        "transformers.trainer.Trainer.__init__ transformers.trainer.Trainer.init_hf_repo "
        "torch.save safetensors.torch.save_file transformers.*.save_file peft.*.save_file "
        "accelerate.*.save_file transformers.tokenization_utils_base.PreTrainedTokenizerBase.save_pretrained",
        "notes what is made in Trainer's folder, which is removed at the end; makes no repository",
        "a prediction leaves a folder behind, and a repository in the user's account",
        "trainers_folder.py, folder_goes_away",
    ),
    Replacement(
        "torch.autograd.backward torch.amp.grad_scaler.GradScaler.step",
        "a training loop of the script's own stops at its first step",
        "it runs to its end, on tensors that hold nothing",
        "own_loops.py, OwnLoops.install",
    ),
    Replacement(
        "*evaluat*.*",
        "evaluations of libraries are traced, and give NaN",
        "they read values, which a trace has not",
        "library_evaluations.py, LibraryEvaluations.install",
    ),
    Replacement(
        "transformers.trainer.Trainer.train transformers.*.evaluate transformers.*.predict trl.*.evaluate "
        "trl.*.predict transformers.trainer.Trainer.__init_subclass__",
        "traces the training and ends the process; evaluations above it are remembered, and traced after its steps",
        "the script trains for real, with tensors that hold nothing",
        "script.py, _at_train",
    ),
    Replacement(
        "transformers.trainer.Trainer.train",
        "puts a plan's loss in chunks into the model",
        "that loss of a plan is not traced",
        "adapters.py, chunk_losses",
        when=lambda script: script.request.overrides is not None and bool(script.request.overrides.loss),
        order="over the row that traces: what is called last is installed last",
    ),
    Replacement(
        "transformers.trainer.Trainer.__new__ transformers.trainer.Trainer.__init__",
        "waits for a plan's settings where the Trainer is made, and goes on once for each",
        "a plan runs the script's first lines again for each setup",
        "forks.py, Forks.install",
        when=lambda script: script.request.forks is not None,
        order="last: its __init__ is called first, so that settings are there before other rows look at them",
    ),
    Replacement(
        "torch.nn.parameter.Parameter.__new__ torch.nn.init._no_grad_trunc_normal_ "
        "torch._subclasses.fake_tensor.FakeTensor.*",
        "parameters are fake, all else on the host is real; who asks a fake tensor for values is stopped",
        "models take their real memory, or what is made up becomes a file or a decision",
        "real_and_fake.py, RealAndFake.__enter__",
        order="when the script runs: until then nothing of it is made",
    ),
    Replacement(
        "torch.save safetensors.torch.save_file *.safe_save_file "
        "huggingface_hub.serialization._torch.get_torch_storage_id *.id_tensor_storage",
        "saves what has values, and writes no weights",
        "a script that saves its model ends, or writes a file that holds nothing",
        "real_and_fake.py, RealAndFake.__enter__",
    ),
)
"""Above a script's first line, on any device."""

AT_TRAIN: Final = (
    Replacement(
        "torch._subclasses.fake_tensor.FakeTensor.numpy "
        "torch._subclasses.fake_tensor.FakeTensorMode.__torch_dispatch__ "
        "transformers.utils.import_utils.is_fake_tensor torch.amp.grad_scaler.GradScaler._maybe_opt_step",
        "a fake tensor gives ones where values are asked for, is a plain one to optimizers, and overflows nowhere",
        "optimizers take other kernels and make no states, and transformers makes masks that no run has",
        lambda script: fake_gpu.made_up_values(),
        order="only now: above train() who asks for values is stopped",
    ),
    Replacement(
        "transformers.generation.utils.GenerationMixin._sample "
        "transformers.generation.utils.GenerationMixin._beam_search "
        "transformers.models.whisper.generation_whisper.WhisperGenerationMixin.generate",
        "three turns of the loop, to the longest answer",
        "generating ends by values, which there are none of: after one token, or never",
        lambda script: answers_are_longest(),
    ),
    Replacement(
        "transformers.generation.utils.GenerationMixin.generate",
        "names the phase in which answers are generated",
        "it counts as forward",
        "phase_hooks.py, TrainingWatch.watch_parts",
        order="after the loop's, which it calls",
    ),
    Replacement(
        "trl.*.shuffle_sequence_dict",
        "keeps the order of answers",
        "in an order by chance nobody knows which answers are where",
        "online.py, answers_are_made_up",
    ),
    Replacement(
        "torch.save torch.load safetensors.torch.save_file "
        "*.load_file *.safe_load_file *.safe_save_file transformers.trainer.Trainer._save_rng_state "
        "huggingface_hub.serialization._torch.get_torch_storage_id *.id_tensor_storage",
        "makes what a save makes on the device, and writes no bytes; what is read has the shapes that were saved",
        "checkpoints of the traced steps fail, or fill the disk with nothing",
        lambda script: write_nothing(script.boundary.all_fake),
        order="over the row of above train(), which tells the user that no weights are written",
    ),
    Replacement(
        "torch.compile",
        "as when the libraries were loaded",
        "what the script has put there since compiles",
        lambda script: fake_gpu.replace_compiler(),
    ),
    Replacement(
        "bitsandbytes.functional.get_paged bitsandbytes.functional.fill bitsandbytes.functional.prefetch_tensor "
        "bitsandbytes.functional.optimizer_update_32bit",
        "paged states are the host's; a norm that is asked for by value is made and not read",
        "managed memory counts as the GPU's, and LARS and LAMB stop at a value",
        lambda script: library_rules.bitsandbytes_optimizers(),
        when=lambda script: script.optimizer_is("bitsandbytes"),
    ),
    Replacement(
        "bitsandbytes::int8_vectorwise_quant bitsandbytes::int8_mixed_scaled_mm",
        "a few columns of the inputs of 8-bit layers are outliers",
        "how many there are depends on values: the trace stops",
        lambda script: library_rules.outliers_are_few(),
        when=lambda script: is_loaded("bitsandbytes"),
        order="after the row that imports bitsandbytes",
    ),
    Replacement(
        "apollo_torch.random_projector.stable_randn",
        "draws with no generator of the GPU's",
        "a generator on a GPU that is not there waits for ever",
        lambda script: library_rules.apollo_draws_on_the_host(),
        when=lambda script: script.optimizer_is("apollo_torch"),
    ),
    Replacement(
        "hf_memkit.components.low_bit_adamw._WideRest._new_buffer",
        "makes 16-bit states fp32 for fake tensors, too",
        "it knows them by their exact type: states are half as large as a run's",
        lambda script: library_rules.wide_states(),
        when=lambda script: script.optimizer_is("hf_memkit.components.low_bit_adamw"),
    ),
    Replacement(
        "triton.runtime.jit.JITFunction.run triton.runtime.autotuner.Autotuner.run "
        "triton.runtime.autotuner.Heuristics.run",
        "a kernel is not launched; its outputs are allocated around it",
        "Triton asks for a GPU's driver, and fails",
        lambda script: library_rules.kernels_are_not_launched(),
        when=lambda script: script.on_gpu and is_installed("triton"),
    ),
    Replacement(
        "transformers.masking_utils.find_packed_sequence_indices",
        "several sequences share a row",
        "made-up position ids say that none do: no masks, another peak",
        lambda script: library_rules.rows_are_packed(with_masks=not with_flash_package(script.setup)),
        when=lambda script: bool(
            "trainer_parts.packed_batches" in script.setup or script.setup.get("arguments.packing")
        ),
    ),
)
"""From `train()` on, within the traced training."""
