"""Table of everything that the child process replaces in torch, transformers and the operating system; it installs it.

Four parts: when the libraries are loaded; a GPU; other patches above a script's first line; and patches from `train()`
on. Within a part, rows are installed in order; `order` says why where that matters. A patch that needs a script's
objects, or comes before this module can be imported, names the function that installs it. Patches of a single object,
a model or a Trainer, are not listed. `tests/predict_script/test_replacements.py` compares the table with a process
that traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.catalog.optimizers import find_optimizer
from hf_memkit.common.when_imported import when_imported
from hf_memkit.prediction.child.gpu import fake_gpu
from hf_memkit.prediction.child.gpu.attention import install_cuda_attention
from hf_memkit.prediction.child.gpu.cuda_queries import patch_memory_queries
from hf_memkit.prediction.child.gpu.flash_attn_package import install_flash_attn
from hf_memkit.prediction.child.gpu.loaded_files import patch_loading
from hf_memkit.prediction.child.gpu.other_ranks import patch_ranks
from hf_memkit.prediction.child.gpu.real_and_fake import RealAndFake
from hf_memkit.prediction.child.gpu.saves import skip_writing
from hf_memkit.prediction.child.libraries import library_rules
from hf_memkit.prediction.child.libraries.deepspeed_engine import disable_deepspeed
from hf_memkit.prediction.child.libraries.library_rules import is_installed, uses_flash_attention
from hf_memkit.prediction.child.libraries.pretrained import patch_from_pretrained
from hf_memkit.prediction.child.quick_imports import is_loaded
from hf_memkit.prediction.child.script.network import send_only_reads
from hf_memkit.prediction.child.script.trackers import disable_trackers
from hf_memkit.prediction.child.trainer_kinds.generation import patch_generate
from hf_memkit.prediction.child.trainer_kinds.sft import patch_fused_head
from hf_memkit.prediction.child.trainer_kinds.trl_base import patch_trl
from hf_memkit.prediction.child.training.plan_facts import note_argument_parsers
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.setup_ledger import optimizer_of


@dataclass(frozen=True, slots=True)
class TracedScript:
    """What decides about rows: the request, what is fake, and from `train()` on the settings of the Trainer."""

    request: ScriptRequest
    boundary: RealAndFake
    setup: Setup = field(default_factory=lambda: Setup(preset="script"))

    @property
    def on_gpu(self) -> bool:
        return self.request.device == "cuda"

    def optimizer_is(self, package: str) -> bool:
        """Whether the Trainer's optimizer belongs to that package or module."""
        name = optimizer_of(self.setup)
        module = name.partition(":")[0]
        return package in find_optimizer(name).packages or f"{module}.".startswith(f"{package}.")


Install = Callable[[TracedScript], Any]
When = Callable[[TracedScript], bool]


@dataclass(frozen=True, slots=True)
class Replacement:
    """A row of the table."""

    what: str  # replaced names, separated by spaces; `*` matches several
    why: str  # what the replacement does
    without: str  # what breaks or differs without it
    install: Install | str  # installs it; or file and function that do
    when: When | None = None  # whether a script needs it; None: every script
    order: str = ""  # why the row is at this position; empty: the order does not matter


def install_replacements(rows: tuple[Replacement, ...], script: TracedScript) -> None:
    """Installs the rows that the script needs, in order."""
    for row in rows:
        if callable(row.install) and (row.when is None or row.when(script)):
            row.install(script)


LOADED: Final = (
    Replacement(
        "at::getCUDAHooks c10::device_guard_impl_registry",
        "C++ code of torch assumes that CUDA is available",
        "the first backward pass of fake CUDA tensors aborts the process",
        "cuda_device_guard.py, install",
        order="first: if it fails, nothing else is loaded",
    ),
    Replacement(
        "torch.compile",
        "modules and flex attention are compiled with kernels that do nothing; torchao's step becomes an upper bound; "
        "other functions raise Unmodelled when they run",
        "the compiler is loaded, and operations in compiled code are not traced",
        "fake_gpu.py, replace_compiler",
        order="before transformers and accelerate, which compile functions when they are imported",
    ),
    Replacement(
        "functools.lru_cache *.lru_cache torch._library.utils.get_source",
        "caches without limit and no source lines, while libraries are imported",
        "loading takes longer: transformers reads the files of its models twice",
        "quick_imports.py, quick_imports",
    ),
    Replacement(
        "datasets transformers.trainer.datasets",
        "imported only when an attribute is read",
        "every process loads it, although not every script uses it",
        "quick_imports.py, import_lazily",
        order="before Trainer, which imports it",
    ),
    Replacement(
        "torch._library.simple_registry.find_torch_dispatch_rule torch._C._group_tensors_by_device_and_dtype",
        "gives the same answers faster",
        "a trace takes longer",
        "fast_fakes.py, speed_up_dispatch",
        order="before the first operation under a dispatch mode, because torch keeps the functions that it finds then",
    ),
    Replacement(
        "transformers.trainer.is_datasets_available accelerate.utils.other.is_deepspeed_available",
        "whether it is imported, not whether it is installed",
        "every case imports both libraries only to check types",
        "serve.py, _load",
    ),
)
"""Installed in the process from which every case is forked."""

ON_A_GPU: Final = (
    Replacement(
        "torch.cuda.* torch._C._cuda_getCurrentRawStream torch.cuda.amp.common.amp_definitely_not_available "
        "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init "
        "torch._subclasses.fake_tensor.init_gpu_context",
        "one GPU of the requested capability and memory, on which nothing runs",
        "torch reports no GPU: the script stops, or trains on the CPU without autocast",
        lambda script: fake_gpu.patch_cuda_device(
            script.request.capability, script.request.capacity_bytes, script.request.gpu_name
        ),
    ),
    Replacement(
        "torch.nn.functional.scaled_dot_product_attention",
        "the kernel that torch chooses on that GPU",
        "torch chooses a CPU kernel, which keeps other tensors",
        lambda script: install_cuda_attention(script.request.capability),
    ),
    Replacement(
        "flash_attn flash_attn_interface transformers.*.is_flash_attn_* "
        "transformers.integrations.hub_kernels.* transformers.modeling_utils.PreTrainedModel.*flash_attn*",
        "the flash-attn package by torch's operations; on older GPUs its error",
        "flash_attention_2 is refused without the package, and with it kernels read memory that does not exist",
        lambda script: install_flash_attn(script.request.capability),
    ),
    Replacement(
        "torch.cuda.* torch.Tensor.record_stream torch.Tensor.pin_memory torch.Tensor.is_pinned",
        "one stream whose work is done at once; pinned memory counts as RAM",
        "torch asks CUDA's driver for streams and events, and raises",
        lambda script: fake_gpu.patch_streams(),
    ),
    Replacement(
        "torch.cuda.* torch.accelerator.* torch.version.cuda torch.Generator",
        "memory as the tracer counts it, and other queries of scripts about a GPU",
        "a script that prints its memory starts CUDA, which raises; a generator on the GPU ends the process",
        lambda script: patch_memory_queries(script.boundary.tracer, script.request.capacity_bytes),
        order="after the GPU's row, whose memory figures it replaces: that row has no tracer",
    ),
    Replacement(
        "torch.load safetensors.*safe_open transformers.*.safe_open accelerate.*.safe_open peft.*.safe_open",
        "files are read on the host; tensors for the GPU become fake",
        "torch and safetensors copy to a GPU that does not exist",
        lambda script: patch_loading(),
    ),
    Replacement(
        "transformers.training_args.is_torch_tf32_available",
        "depends on the GPU's capability",
        "tf32=True is refused: transformers asks a build without CUDA for its CUDA version",
        lambda script: library_rules.patch_tf32_check(),
    ),
    Replacement(
        "bitsandbytes.functional.lib",
        "functions called by pointer do nothing",
        "axolotl and Unsloth write through addresses of tensors that have no memory",
        lambda script: when_imported("bitsandbytes.functional", library_rules.disable_pointer_calls),
    ),
    Replacement(
        "trl.kernels.chunked_logprob.*",
        "TRL's head uses the code for Triton, and launches nothing",
        "its code without Triton has larger tiles: another peak",
        lambda script: when_imported("trl.kernels.chunked_logprob", patch_fused_head),
        when=lambda script: not is_installed("triton"),
    ),
)
"""Installed before the first line of a script that trains on a GPU."""

ABOVE_TRAIN: Final = (
    Replacement(
        "transformers.training_args.TrainingArguments.__getattribute__ "
        "transformers.modeling_utils.PreTrainedModel.from_pretrained "
        "transformers.modeling_utils.PreTrainedModel._from_config transformers.trainer.Trainer.__init__ "
        "transformers.trainer.Trainer.train",
        "a plan's fields and options override the script's",
        "every setup of a plan is traced like the unchanged script",
        "script_overrides.py, install",
        when=lambda script: script.request.overrides is not None,
        order="before the GPU and all rows below, which then see the plan's values like the script's",
    ),
    Replacement(
        "transformers.trainer.Trainer.__new__",
        "the first Trainer gets a plan's adapters",
        "adapters of a plan are not traced",
        "adapters.py, add_adapters_to_first_trainer",
        when=lambda script: script.request.overrides is not None and bool(script.request.overrides.adapter),
    ),
    Replacement(
        "torch.compile",
        "as when the libraries were loaded",
        "without fake CUDA tensors no library was loaded, and the script's imports load the compiler",
        lambda script: fake_gpu.replace_compiler(),
    ),
    Replacement(
        "torch.nn.modules.module.Module._apply torch.Tensor._make_subclass",
        "a moved parameter stays the same object; a library's parameter class may be fake",
        "Module.to fails on fake parameters, and optimizers keep the old ones",
        lambda script: fake_gpu.patch_module_apply(),
    ),
    Replacement(
        "torch.autograd.grad_mode.inference_mode.__enter__ torch.autograd.grad_mode.inference_mode.__exit__",
        "works as no_grad, with the same memory",
        "operations reach the tracer before torch decomposes them, and fake tensors have no rule for them",
        lambda script: fake_gpu.replace_inference_mode(),
    ),
    Replacement(
        "torch._subclasses.fake_tensor.FakeTensor.__deepcopy__",
        "a fake tensor with a known number can be copied",
        "accelerate's copy of an optimizer's groups fails (torchao's learning rate)",
        lambda script: library_rules.patch_deepcopy(),
    ),
    Replacement(
        "torch.tensor",
        "reads known numbers of fake tensors",
        "torch reads them outside all modes, and fails (Qwen2.5-VL's positions, Liger's backward pass)",
        lambda script: library_rules.patch_tensor_constructor(),
    ),
    Replacement(
        "torch._refs._reshape_view_helper",
        "a view that strides do not allow raises RuntimeError, as with real tensors",
        "code that catches that error ends with ValueError (axolotl)",
        lambda script: library_rules.patch_view_errors(),
    ),
    Replacement(
        "torch._dynamo.trace_rules.load_object",
        "functions of memkit have no rules for the compiler",
        "the import of the compiler fails: several functions of torch.cuda are the same one",
        lambda script: when_imported("torch._dynamo.trace_rules", fake_gpu.skip_own_functions),
    ),
    Replacement(
        "unsloth_zoo.tokenizer_utils.fix_untrained_tokens",
        "reads no weight",
        "Unsloth reads the values of the embedding, which has none",
        lambda script: when_imported("unsloth_zoo.tokenizer_utils", library_rules.disable_weight_check),
    ),
    Replacement(
        "transformers.hf_argparser.HfArgumentParser.parse_args_into_dataclasses "
        "trl.scripts._hf_argparser.HfArgumentParser.parse_args_into_dataclasses",
        "records that arguments come from the command line",
        "a plan does not know whether its arguments can be given as flags",
        lambda script: note_argument_parsers(),
    ),
    Replacement(
        "transformers.trainer.Trainer.__init__ trl.*.hash_module trl.*._precompute_ref_logps "
        "trl.generation.vllm_generation.* trl.*.is_vllm_available",
        "replaces computations of TRL's Trainers that need values before they train (trainer_kinds/trl_base.py)",
        "DPO and KTO compute log-probabilities of all rows; use_vllm needs vLLM",
        lambda script: patch_trl(),
    ),
    Replacement(
        "transformers.training_args.TrainingArguments.__post_init__",
        "accepts a DeepSpeed JSON and starts no engine",
        "accelerate starts process groups and an engine, which needs real memory",
        lambda script: disable_deepspeed(),
    ),
    Replacement(
        "torch.distributed.* torch.distributed.distributed_c10d.* torch.cuda.device_count "
        "torch.nn.parallel.DistributedDataParallel accelerate.utils.operations.* "
        "torch.distributed.fsdp._fully_shard.* torch.distributed._functional_collectives.wait_tensor "
        "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached "
        "torch.storage.UntypedStorage.resize_ torch._subclasses.fake_tensor.FakeTensor.data_ptr "
        "torch.distributed.checkpoint.save torch.distributed.checkpoint.load torch._C._get_accelerator "
        "torch.distributed._state_dict_utils._broadcast_tensors "
        "accelerate.data_loader.synchronize_rng_states",
        "the first of several ranks; communication is done at once",
        "the script waits for ranks that are not started",
        lambda script: patch_ranks(script.request.processes, script.request.per_node, script.boundary.tracer),
        when=lambda script: script.request.is_rank,
        order="after the GPU's row, which reports one GPU",
    ),
    Replacement(
        "transformers.modeling_utils.get_hf_quantizer transformers.modeling_utils._get_resolved_checkpoint_files "
        "transformers.modeling_utils.PreTrainedModel._load_pretrained_model "
        "transformers.modeling_utils.init_empty_weights transformers.integrations.bitsandbytes.init_empty_weights",
        "from_pretrained reads the config, and parameters are fake",
        "gigabytes of weights are downloaded and read",
        lambda script: patch_from_pretrained(script.boundary),
    ),
    Replacement(
        "huggingface_hub.hf_api.HfApi.* huggingface_hub.*.xet_connection_info_refresh_url "
        "huggingface_hub.inference.*._inner_post *.get_session *.get_async_session requests.sessions.Session.send "
        "httpx*Client.send transformers.*.push_to_hub datasets.*.push_to_hub",
        "reads from the Hub; what would write returns an object of its class, or raises",
        "a prediction creates repositories, uploads and deletes with the user's token",
        lambda script: send_only_reads(),
    ),
    Replacement(
        "wandb.* swanlab.* trackio.* mlflow.* comet_ml.* clearml.* neptune.* dvclive.* codecarbon.* dagshub.* "
        "azureml.core.run.*",
        "starts no run",
        "a prediction appears in the user's dashboard, and leaves a tracker's files",
        lambda script: disable_trackers(),
    ),
    Replacement(
        "os.remove os.unlink os.rmdir os.rename os.replace os.mkdir os.symlink os.link os.open "
        "posix.remove posix.unlink posix.rmdir posix.rename posix.replace posix.mkdir posix.symlink posix.link "
        "posix.open shutil.rmtree torch.save safetensors.*serialize_file tokenizers.Tokenizer.save "
        "tokenizers.models.Model.save sqlite3.connect sqlite3.dbapi2.connect",
        "files that existed before the prediction stay, or are copied before they change; an audit hook also sees "
        "files that are opened",
        "a script that begins with an empty folder destroys the user's results",
        "file_guards.py, OlderFiles.install",
    ),
    Replacement(
        "torch.multiprocessing.start_processes torch.multiprocessing.spawn.start_processes "
        "accelerate.launchers.are_libraries_initialized multiprocessing.popen_spawn_posix.Popen._launch "
        "multiprocessing.popen_forkserver.Popen._launch subprocess.Popen.__init__ "
        "os.execve os.posix_spawn os.posix_spawnp posix.execve posix.posix_spawn posix.posix_spawnp",
        "a training in another process ends the prediction; an audit hook also sees programs that start, and "
        "each gets a sitecustomize that waits for a training",
        "the script trains for real, in a process in which nothing is replaced",
        "refuse_training_processes.py, refuse_training_processes",
    ),
    Replacement(
        "transformers.trainer.Trainer.__init__",
        "records files in Trainer's folder, which are removed at the end",
        "a prediction leaves a folder behind",
        "output_folder.py, record_output_folder",
    ),
    Replacement(
        "torch.autograd.backward torch.amp.grad_scaler.GradScaler.step",
        "the script's own training loop stops at its first step",
        "it runs to its end, on tensors without values",
        "own_loops.py, OwnLoops.install",
    ),
    Replacement(
        "*evaluat*.*",
        "evaluations of libraries are traced, and return NaN",
        "they read values, which a trace does not have",
        "library_evaluations.py, LibraryEvaluations.install",
    ),
    Replacement(
        "transformers.trainer.Trainer.train transformers.*.evaluate transformers.*.predict trl.*.evaluate "
        "trl.*.predict transformers.trainer.Trainer.__init_subclass__",
        "traces the training and ends the process; earlier evaluations are recorded, and traced after its steps",
        "the script trains for real, with tensors without values",
        "script.py, _ScriptRun._replace_train",
    ),
    Replacement(
        "transformers.trainer.Trainer.train",
        "installs a plan's loss in chunks in the model",
        "that loss of a plan is not traced",
        "adapters.py, chunk_losses",
        when=lambda script: script.request.overrides is not None and bool(script.request.overrides.loss),
        order="after the row that traces, so that it is called before it",
    ),
    Replacement(
        "transformers.trainer.Trainer.__new__ transformers.trainer.Trainer.__init__",
        "waits for a plan's settings where the Trainer is created, and continues in a fork for each",
        "a plan runs the script from its first line for each setup",
        "forks.py, Forks.install",
        when=lambda script: script.request.forks is not None,
        order="last: its __init__ is called first, so that other rows see the settings",
    ),
    Replacement(
        "torch.nn.parameter.Parameter.__new__ torch.nn.init._no_grad_trunc_normal_ "
        "torch._subclasses.fake_tensor.FakeTensor.*",
        "parameters are fake, other tensors on the host are real; reading values of a fake tensor stops the script",
        "models need their real memory, or made-up values reach files and decisions",
        "real_and_fake.py, RealAndFake.__enter__",
        order="when the script runs, before it creates any tensor",
    ),
    Replacement(
        "torch.save safetensors.torch.save_file *.safe_save_file "
        "huggingface_hub.serialization._torch.get_torch_storage_id *.id_tensor_storage",
        "saves content with values, and writes no weights",
        "a script that saves its model fails, or writes a file without values",
        "real_and_fake.py, RealAndFake.__enter__",
    ),
)
"""Installed before a script's first line, on any device."""

AT_TRAIN: Final = (
    Replacement(
        "torch._subclasses.fake_tensor.FakeTensor.numpy "
        "torch._subclasses.fake_tensor.FakeTensorMode.__torch_dispatch__ "
        "transformers.utils.import_utils.is_fake_tensor torch.amp.grad_scaler.GradScaler._maybe_opt_step",
        "a fake tensor has ones as values, counts as a plain tensor for optimizers, and never overflows",
        "optimizers use other kernels and create no states, and transformers makes masks that a run does not have",
        lambda script: fake_gpu.patch_fake_values(),
        order="only now: above train() reading values stops the script",
    ),
    Replacement(
        "transformers.generation.utils.GenerationMixin._sample "
        "transformers.generation.utils.GenerationMixin._beam_search "
        "transformers.models.whisper.generation_whisper.WhisperGenerationMixin.generate",
        "runs three turns of the loop, for answers of maximum length",
        "values decide when generation ends; without them it ends after one token, or never",
        lambda script: patch_generate(),
    ),
    Replacement(
        "transformers.generation.utils.GenerationMixin.generate",
        "marks the phase in which answers are generated",
        "it counts as forward",
        "phase_hooks.py, TrainingWatch.watch_parts",
        order="after the loop's row, which it calls",
    ),
    Replacement(
        "trl.*.shuffle_sequence_dict",
        "keeps the order of answers",
        "in a random order the position of each answer is unknown",
        "online.py, patch_rewards",
    ),
    Replacement(
        "torch.save torch.load safetensors.torch.save_file "
        "*.load_file *.safe_load_file *.safe_save_file transformers.trainer.Trainer._save_rng_state "
        "huggingface_hub.serialization._torch.get_torch_storage_id *.id_tensor_storage",
        "makes the tensors of a save on the device, and writes no bytes; loading gives the saved shapes",
        "checkpoints of the traced steps fail, or fill the disk",
        lambda script: skip_writing(script.boundary.all_fake),
        order="overrides the row above train(), which reports that no weights are written",
    ),
    Replacement(
        "torch.compile",
        "as when the libraries were loaded",
        "a later replacement by the script compiles",
        lambda script: fake_gpu.replace_compiler(),
    ),
    Replacement(
        "bitsandbytes.functional.get_paged bitsandbytes.functional.fill bitsandbytes.functional.prefetch_tensor "
        "bitsandbytes.functional.optimizer_update_32bit",
        "paged states count as RAM; a norm is computed and its value not read",
        "managed memory counts as the GPU's, and LARS and LAMB fail at a value",
        lambda script: library_rules.patch_bitsandbytes_optimizers(),
        when=lambda script: script.optimizer_is("bitsandbytes"),
    ),
    Replacement(
        "bitsandbytes::int8_vectorwise_quant bitsandbytes::int8_mixed_scaled_mm",
        "a few columns of the inputs of 8-bit layers are outliers",
        "their number depends on values, and the trace stops",
        lambda script: library_rules.assume_few_outliers(),
        when=lambda script: is_loaded("bitsandbytes"),
        order="after the row that imports bitsandbytes",
    ),
    Replacement(
        "apollo_torch.random_projector.stable_randn",
        "draws without a GPU generator",
        "a generator on a fake GPU waits forever",
        lambda script: library_rules.patch_apollo_random(),
        when=lambda script: script.optimizer_is("apollo_torch"),
    ),
    Replacement(
        "hf_memkit.components.low_bit_adamw._Fp32States._new_buffer",
        "makes 16-bit states fp32 for fake tensors, too",
        "it compares the exact type: states are half as large as in a run",
        lambda script: library_rules.patch_low_bit_states(),
        when=lambda script: script.optimizer_is("hf_memkit.components.low_bit_adamw"),
    ),
    Replacement(
        "triton.runtime.jit.JITFunction.run triton.runtime.autotuner.Autotuner.run "
        "triton.runtime.autotuner.Heuristics.run",
        "a kernel is not launched; its outputs are allocated around it",
        "Triton needs a GPU's driver, and fails",
        lambda script: library_rules.skip_triton_kernels(),
        when=lambda script: script.on_gpu and is_installed("triton"),
    ),
    Replacement(
        "transformers.masking_utils.find_packed_sequence_indices",
        "several sequences share a row",
        "by made-up position ids none do: no masks, another peak",
        lambda script: library_rules.patch_packed_sequences(with_masks=not uses_flash_attention(script.setup)),
        when=lambda script: bool(
            "trainer_parts.packed_batches" in script.setup or script.setup.get("arguments.packing")
        ),
    ),
)
"""Installed from `train()` on, within the traced training."""
