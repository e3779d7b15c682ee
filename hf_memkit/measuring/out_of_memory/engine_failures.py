"""Errors of FSDP, and of jobs with several processes, that are not about memory: what they mean and what helps.

A row is data. `Failure.of` takes the first one of a form that fits the traceback, so a special case stands above the
general one. Sources: torch 2.13.0, accelerate 1.15.0, transformers 5.23.0 and public issues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hf_memkit.measuring.out_of_memory.change import Remedy
from hf_memkit.measuring.out_of_memory.traceback import Call, Feature, TracebackFacts

FailureCause = Literal["FSDP", "several processes"]


@dataclass(frozen=True, slots=True)
class Failure:
    """One error of an engine.

    Attributes:
        form: the name of its words, which several rows may have.
        head, words: as in `patterns.Form`; empty if a row above has them.
        what: what happened, without a full stop.
        why: the reason in sentences.
        fixes: what helps, the best first.
        source: the line that raises it, and issues.
        rule: the rule of `memkit check` that finds the mistake before a run.
        seen: techniques in use and calls that the frames must show; of FSDP, any line of the log may.
        rank: as in `patterns.Form`: an error stands above a kill, and a timeout follows from either.
    """

    form: str
    head: str
    words: tuple[str, ...]
    what: str
    why: str
    fixes: tuple[Remedy, ...]
    source: str
    rule: str = ""
    seen: tuple[Feature | Call, ...] = ()
    cause: FailureCause = "FSDP"
    rank: int = 2

    @staticmethod
    def of(form: str, trace: TracebackFacts) -> Failure | None:
        """The row for an error of this form; None for other forms, and if another job raised it."""
        rows = (row for row in FAILURES if row.form == form)
        return next((row for row in rows if trace.in_use | trace.calls >= {*row.seen}), None)


def _fsdp(value: str, reason: str) -> Remedy:
    return Remedy("arguments.fsdp_config", f"{{{value}}}", reason)


def _argument(name: str, value: str, reason: str) -> Remedy:
    return Remedy(f"arguments.{name}", value, reason)


def _code(value: str, reason: str) -> Remedy:
    return Remedy("command", value, reason)


_VERSION_2: Final = _fsdp("version: 2", "shards each weight separately, whatever its type and whether it is trained")
_CALL: Final = _code(
    "model(**inputs)", "call the whole model that Trainer wrapped (trainer.model_wrapped), not a part"
)
_SAVE_MODEL: Final = _code("trainer.save_model()", "gathers the weights; every rank must call it, rank 0 writes")
_WHOLE: Final = _fsdp("state_dict_type: FULL_STATE_DICT", "a save then gathers whole weights")
_TORCHAO: Final = _argument("optim", "adamw_torch_8bit", "torchao's 8-bit AdamW knows sharded weights")
_FIRST_ERROR: Final = _code("grep -n Error LOG", "finds the first error, in the logs of all ranks")
_LONGER: Final = _argument("ddp_timeout", "7200", "seconds, if rank 0 tokenizes, saves or evaluates for so long")
_ABSENT: Final = (
    "One rank did not take part in a collective operation: it failed earlier, hung, had fewer batches, or saved "
    "alone. An earlier error, in the log of any rank, is the cause."
)
_NO_LOADING: Final = _fsdp("cpu_ram_efficient_loading: false", "each process then loads the weights, in its own RAM")

FAILURES: Final[tuple[Failure, ...]] = (
    # Version 1: one flat tensor a layer
    Failure(
        "fsdp-dtypes",
        r"Must flatten tensors with uniform dtype[^\n]{0,80}|`FlatParameter` requires uniform dtype[^\n]{0,80}",
        ("must flatten tensors with uniform dtype", "requires uniform dtype"),
        "FSDP refused a layer whose weights have several types",
        "Version 1 of FSDP joins the weights of a layer into one tensor, which has one type. PEFT keeps adapters in "
        "fp32 beside 16-bit weights; norms may be fp32, and 4-bit weights stored in another type.",
        (
            _VERSION_2,
            Remedy("model.dtype", "bfloat16", "for all weights; with PEFT also autocast_adapter_dtype=False of "
                   "get_peft_model"),
            Remedy("model.quantization.bnb_4bit_quant_storage", "bfloat16", "4-bit weights: the type of the others"),
        ),
        "torch 2.13.0: distributed/fsdp/_flat_param.py 812; github.com/huggingface/trl/issues/1723, "
        "github.com/huggingface/peft/issues/484",
    ),
    Failure(
        "fsdp-trained-dtypes", r"FSDP expects uniform original parameter dtype[^\n]{0,80}",
        ("uniform original parameter dtype",),
        "FSDP refused a layer whose trained weights have several types",
        "Version 2 of FSDP reduces the gradients of a layer together, in one type.",
        (Remedy("model.dtype", "bfloat16, or float32 with bf16: true", "one type for all weights that are trained"),),
        "torch 2.13.0: distributed/fsdp/_fully_shard/_fsdp_param_group.py, _init_mp_dtypes",
    ),
    Failure(
        "fsdp-frozen",
        r"Must flatten tensors with uniform `?requires_grad`?[^\n]{0,50}"
        r"|`FlatParameter` requires uniform `requires_grad`",
        ("uniform requires_grad", "uniform `requires_grad`"),
        "FSDP refused a layer in which some weights are frozen",
        "Version 1 of FSDP joins the weights of a layer into one tensor, which is trained or frozen as a whole. "
        "Adapters are trained beside frozen weights.",
        (_VERSION_2, _fsdp("use_orig_params: true", "if you stay with version 1; it needs more memory")),
        "torch 2.13.0: distributed/fsdp/_flat_param.py 821; github.com/huggingface/peft/issues/1702",
    ),
    Failure(
        "fsdp-integers", r"Cannot flatten integer dtype tensors", ("flatten integer dtype",),
        "FSDP cannot shard quantized weights that are stored as integers",
        "bitsandbytes stores 4-bit weights as bytes unless it is given another type, and 8-bit weights always.",
        (
            Remedy("model.quantization.bnb_4bit_quant_storage", "bfloat16", "the type of the other weights, so that "
                   "FSDP can shard them"),
            Remedy("model.quantization", "load_in_4bit instead of load_in_8bit", "8-bit weights cannot be sharded"),
        ),
        "torch 2.13.0: distributed/fsdp/_flat_param.py 810; github.com/huggingface/peft/issues/1432, "
        "github.com/axolotl-ai-cloud/axolotl/issues/2250",
    ),
    # Which layers are wrapped
    Failure(
        "fsdp-wrap-class",
        r"Could not find the transformer layer class(?: (?!to wrap)[^\s{]{1,80}| to wrap)? in the model",
        ("find the transformer layer class",),
        "FSDP did not find the layer class that it was given",
        "The class is of another model, or misspelt. A file of an earlier job may set it: "
        "~/.cache/huggingface/accelerate/default_config.yaml.",
        (
            _fsdp("transformer_layer_cls_to_wrap: CLASS", "print(model) shows the class of the layers, such as "
                  "LlamaDecoderLayer"),
            _code("delete transformer_layer_cls_to_wrap", "the model's own list is then read (_no_split_modules)"),
        ),
        "accelerate 1.15.0: utils/dataclasses.py 2095, utils/fsdp_utils.py 953; "
        "github.com/tatsu-lab/stanford_alpaca/issues/58",
        rule="fsdp-wrap-class",
    ),
    Failure(
        "fsdp-tied-groups",
        r"Parameter '[^'\n]{1,200}' is shared with a parameter already managed by another FSDP group",
        ("managed by another fsdp group",),
        "FSDP refused weights that two of its groups share",
        "Input and output embeddings are one weight. torch 2.13 refuses it in two groups, and accelerate before 1.15 "
        "puts it there.",
        (
            _code('pip install -U "accelerate>=1.15"', "wraps tied embeddings as one group"),
            _code("fully_shard([embeddings, lm_head])", "in your own code: both in one call"),
        ),
        "torch 2.13.0: distributed/fsdp/_fully_shard/_fsdp_state.py 223; github.com/huggingface/accelerate/pull/4171",
    ),
    Failure(
        "fsdp-tied-mapping", r"FSDP2 mapping failed \(missing: [^\n]{0,120}", ("fsdp2 mapping failed",),
        "FSDP did not find a weight again after wrapping",
        "The config ties input and output embeddings, and the checkpoint has both.",
        (_code("model.config.tie_word_embeddings = False", "after from_pretrained, before the Trainer is made"),),
        "accelerate 1.15.0: accelerator.py 1756; github.com/huggingface/accelerate/issues/3870",
    ),
    # Sharded weights that an operation or optimizer does not know
    Failure(
        "fsdp-optimizer",
        r"bitsandbytes\.\w{1,80}\.default:? got mixed torch\.Tensor and DTensor"
        r"|Operator bitsandbytes\.\S{1,80} does not have a sharding strategy",
        ("default got mixed torch.tensor", "default: got mixed torch.tensor", "have a sharding strategy"),
        "bitsandbytes' optimizer does not know FSDP2's sharded weights",
        "Version 2 of FSDP shards weights as DTensors, for which bitsandbytes' optimizers have no operator.",
        (_TORCHAO, _argument("optim", "adamw_torch_fused", "with cpu_offload, if its states do not fit")),
        "bitsandbytes 0.50.2: optim/optimizer.py 540; github.com/bitsandbytes-foundation/bitsandbytes/issues/1633",
        rule="fsdp-optimizer",
    ),
    Failure(
        "fsdp-sharded-weight",
        r"[\w.]{0,80}:? ?[gG]ot mixed torch\.Tensor and DTensor", ("got mixed torch.tensor and dtensor",),
        "Liger's loss met a weight of which this GPU has a shard",
        "Liger's fused loss reads the weights of the output layer without calling it, so FSDP does not gather them.",
        (_argument("liger_kernel_config", "{fused_linear_cross_entropy: false, cross_entropy: true}",
                   "Liger's other kernels work"),),
        "liger_kernel 0.8.5: model/llama.py 194; github.com/linkedin/Liger-Kernel/issues/332",
        rule="fsdp-liger-adapters", seen=("FSDP", "Liger's fused loss"),
    ),
    Failure(
        "fsdp-sharded-weight", "", (), "The optimizer does not know FSDP2's sharded weights",
        "Adafactor and APOLLO keep states that are no DTensors.", (_TORCHAO,),
        "transformers 5.23.0: optimization.py 1266; apollo-torch 1.0.3: random_projector.py 112",
        rule="fsdp-optimizer", seen=("FSDP", "Adafactor or APOLLO"),
    ),
    Failure(
        "fsdp-sharded-weight", "", (),
        "An operation in a recomputed layer met a weight of which this GPU has a shard",
        "With nested layers and several forwards before one backward, such as those of DPO, torch before 2.13 does "
        "not gather the weights again for the recomputation.",
        (_code("pip install -U torch", "2.13 gathers them"), _CALL),
        "github.com/pytorch/pytorch/issues/153354, github.com/pytorch/pytorch/pull/171779",
        seen=("FSDP", "recomputation"),
    ),
    Failure(
        "fsdp-sharded-weight", "", (),
        "An operation met a weight of which this GPU has a shard",
        "FSDP gathers the weights of a layer when that layer is called. Code that calls a part of the model, or reads "
        "a weight, gets the shard.",
        (
            _CALL,
            _code("module.unshard(), then module.reshard()", "gathers the weights of one wrapped module around code "
                  "that reads them"),
        ),
        "torch 2.13.0: distributed/tensor/_dispatch.py 819; github.com/huggingface/trl/issues/4550",
        seen=("FSDP",),
    ),
    Failure(
        "fsdp-flat-weight",
        r"'weight' must be 2-D|The tensor has a non-zero number of elements, but its data is not allocated yet"
        r"|size mismatch, got input \(\d{1,9}\), mat \([^)\n]{1,40}\), vec \(\d{1,12}\)",
        ("'weight' must be 2-d", "data is not allocated yet", "size mismatch, got input"),
        "An operation met a weight that is not gathered",
        "Version 1 of FSDP holds flat shards of the weights, and gathers them when the whole model is called. Code "
        "that calls a part of the model, reads a weight, or generates with the model inside, gets the shard.",
        (
            _CALL,
            _code("FullyShardedDataParallel.summon_full_params(model)", "around code that needs whole weights, such "
                  "as generate()"),
            _VERSION_2,
        ),
        "github.com/huggingface/transformers/issues/32285, github.com/linkedin/Liger-Kernel/issues/332, "
        "github.com/pytorch/pytorch/issues/82461",
        seen=("FSDP",),
    ),
    Failure(
        "fsdp-part-first",
        r"Non-root FSDP instance's `_is_root` should not have been set yet"
        r"|FSDP state has already been lazily initialized for [^\n]{1,120}",
        ("non-root fsdp instance", "been lazily initialized"),
        "A part of the model ran before the whole model",
        "The first call decides which module is the root of FSDP: it must be the whole model.",
        (_CALL,),
        "torch 2.13.0: distributed/fsdp/_fully_shard/_fsdp_state.py 192, distributed/fsdp/_runtime_utils.py 157",
    ),
    Failure(
        "fsdp-devices", r"Expected all tensors to be on the same device, but [^\n]{0,120}",
        ("expected all tensors to be on the same device",),
        "A model that FSDP did not wrap is still in RAM",
        "FSDP moves the model that it wraps. A reference, teacher or reward model beside it stays where it was "
        "loaded.",
        (
            _code("pip install -U trl", "its Trainers wrap the second model too"),
            _code("trl.models.utils.prepare_fsdp(model, accelerator)", "wraps a second model in your own code"),
            _code("delete model.to(…)", "of a model that is wrapped: with cpu_offload its weights must stay in RAM"),
        ),
        "github.com/huggingface/trl/issues/2584, github.com/hiyouga/LlamaFactory/issues/9560", seen=("FSDP",),
    ),
    # Weights without data, or at the wrong place
    Failure(
        "fsdp-meta",
        r"FSDP parameters should be materialized from meta device before training[^\n]{0,200}",
        ("materialized from meta device",),
        "FSDP wrapped weights that no process loaded",
        "They are on the device `meta`, without data: the checkpoint does not have them, or the model was made "
        "without from_pretrained.",
        (_NO_LOADING, _code("AutoModelForCausalLM.from_config(config)", "a new model, outside init_empty_weights")),
        "torch 2.13.0: distributed/fsdp/_fully_shard/_fsdp_param_group.py 1034",
    ),
    Failure(
        "fsdp-meta-copy", r"Cannot copy out of meta tensor; no data", ("cannot copy out of meta tensor",),
        "FSDP met weights without data",
        "With cpu_ram_efficient_loading only rank 0 loads the weights; the others get theirs from it when the Trainer "
        "wraps the model. Code that copies or moves the model before, or a model that does not support it, finds "
        "none.",
        (
            _NO_LOADING,
            _fsdp("sync_module_states: true", "with version 1, which sends the weights of rank 0 only then"),
        ),
        "github.com/huggingface/accelerate/issues/2031", seen=("FSDP",),
    ),
    Failure(
        "fsdp-offload-device",
        r"FSDP parameters should be materialized on CPU when enabling CPU offloading"
        r"|with parameter CPU offloading enabled has parameters on [^\n]{0,40}",
        ("materialized on cpu", "cpu offloading enabled has"),
        "FSDP's offload met weights that are not in RAM",
        "With offload the weights must stay in RAM. device_map, or model.to() and model.cuda(), moved them.",
        (_code("delete device_map and model.to(…)", "FSDP moves each layer when it needs it"),),
        "torch 2.13.0: distributed/fsdp/_fully_shard/_fsdp_param_group.py 1050, "
        "distributed/fsdp/_runtime_utils.py 163",
    ),
    Failure(
        "fsdp-moved",
        r"_apply\(\): Couldn't swap [\w.]{1,80}|FSDP-managed module unexpectedly has parameters on [^\n]{0,40}",
        ("couldn't swap", "module unexpectedly has"),
        "A wrapped model was moved or cast",
        "FSDP places the weights when it wraps the model, and their type is fixed from then on.",
        (
            _code("delete model.to(…), .cuda(), .half() and .float()", "after the Trainer or accelerator.prepare "
                  "wrapped the model; set model.dtype instead"),
        ),
        "accelerate 1.15.0: accelerator.py 1798; torch 2.13.0: distributed/fsdp/_runtime_utils.py 157", seen=("FSDP",),
    ),
    Failure(
        "fsdp-cpu-collective", r"No backend type associated with device type cpu", ("no backend type associated",),
        "NCCL cannot reduce tensors in RAM",
        "If cpu_offload is on, the gradients are in RAM, and clipping them reduces their norm over all ranks there. "
        "NCCL alone has no way to do that.",
        (
            _argument("ddp_backend", "cuda:nccl,cpu:gloo", "in a file or in Python; Trainer's parser refuses it as a "
                      "flag"),
            _code("ACCELERATE_USE_FSDP=true FSDP_OFFLOAD_PARAMS=true", "in the environment: accelerate then takes "
                  "both"),
            _argument("max_grad_norm", "0", "no clipping"),
        ),
        "accelerate 1.15.0: state.py 226; github.com/pytorch/pytorch/issues/148532", seen=("FSDP",),
    ),
    Failure(
        "fsdp-needs-gpu",
        r"FSDP (?:needs a non-CPU accelerator device|does not support CPU only execution)[^\n]{0,60}",
        ("non-cpu accelerator", "cpu only execution"),
        "Version 1 of FSDP needs a GPU",
        "torch sees none in this process.",
        (_code("nvidia-smi", "lists the GPUs; CUDA_VISIBLE_DEVICES must not be empty"),),
        "torch 2.13.0: distributed/fsdp/_init_utils.py 390, _runtime_utils.py 131",
    ),
    # How the job is put together
    Failure(
        "fsdp-prepare",
        r"When using FSDP2, a model and optimizer must be passed together|Only one model is supported when using FSDP2"
        r"|FSDP2 preparation should be done via",
        ("must be passed together", "only one model is supported when", "fsdp2 preparation should"),
        "accelerator.prepare() got a model without its optimizer, or several models",
        "FSDP2 changes the weights of the model, and the optimizer must take the new ones.",
        (_code("accelerator.prepare(model, optimizer)", "one model and its optimizer in one call"),),
        "accelerate 1.15.0: accelerator.py 1517-1523, 1914",
    ),
    Failure(
        "fsdp-optimizers", r"Passing `optimizers` is not allowed if PyTorch FSDP is enabled",
        ("`optimizers` is not allowed",),
        "Trainer refuses an optimizer that was made before FSDP shards the weights",
        "It would hold the whole weights.",
        (_code("Trainer(optimizer_cls_and_kwargs=(CLASS, {…}))", "Trainer then makes it after wrapping; or override "
               "create_optimizer"),),
        "transformers 5.23.0: trainer.py 718",
    ),
    Failure(
        "fsdp-one-process", r"Using fsdp only works in distributed training", ("using fsdp only works",),
        "FSDP was set in a job that was started as one process",
        "FSDP shards over the processes of a launcher.",
        (_code("torchrun --nproc_per_node GPUS train.py …", "or accelerate launch --num_processes GPUS"),),
        "transformers 5.23.0: trainer.py 478",
    ),
    Failure(
        "fsdp-and-deepspeed", r"Using --fsdp xxx together with --deepspeed is not possible", ("--fsdp xxx together",),
        "Trainer refuses FSDP together with DeepSpeed", "Both divide the weights.",
        (_code("delete fsdp or deepspeed", "`memkit plan` compares both"),),
        "transformers 5.23.0: trainer.py 474", rule="fsdp-and-deepspeed",
    ),
    Failure(
        "fsdp-checkpointing-twice",
        r"`activation_checkpointing` training argument can't both be set to True"
        r"|activation_checkpointing in FSDP config and the gradient_checkpointing in training arg can't be set to",
        ("can't both be set to true", "gradient_checkpointing in training arg"),
        "Trainer's checkpointing and FSDP's are both on",
        "Each layer would be recomputed twice.",
        (
            _argument("activation_checkpointing", "false", "keep FSDP's (before transformers 5.23: "
                      "gradient_checkpointing)"),
            _fsdp("activation_checkpointing: false", "keep Trainer's: with PEFT, FSDP's saves an empty adapter"),
        ),
        "transformers 5.23.0: trainer.py 880", rule="checkpointing-and-fsdp",
    ),
    Failure(
        "fsdp-recomputed", r"Recomputed values for the following tensors have different metadata",
        ("recomputed values for the following",),
        "Checkpointing recomputed other tensors than forward saved",
        "Trainer's checkpointing and FSDP disagree about what a layer gets: its inputs were cast in forward but not "
        "in the recomputation, or the model caches keys and values.",
        (
            Remedy("model.use_cache", "false", "a cache grows between forward and recomputation"),
            _fsdp("activation_checkpointing: true", "with activation_checkpointing=False in the arguments: FSDP's "
                  "checkpointing wraps the layers inside. Not with PEFT"),
            _code("pip install -U torch transformers accelerate", "later versions cast the inputs in both"),
        ),
        "github.com/huggingface/transformers/issues/34928, github.com/pytorch/pytorch/issues/159359", seen=("FSDP",),
    ),
    Failure(
        "fsdp-refused-value",
        r"`fsdp=\S{1,40}` is only available with FSDP1|Unknown `fsdp` option: [^\n{]{1,60}"
        r"|`?auto_wrap_policy`? must be one of|forward_prefetch is not yet implemented in FSDP2"
        r"|`sync_module_states` must be [^\n]{0,20}True|set `--fsdp_sync_module_states` to `True`"
        r"|`activation_checkpointing_offload=True` requires",
        ("only available with fsdp1", "unknown `fsdp` option", "must be one of", "yet implemented in fsdp2",
         "`sync_module_states` must", "--fsdp_sync_module_states", "checkpointing_offload=true"),
        "A setting of FSDP has a value that is refused",
        "Versions 1 and 2 of FSDP have other settings, and Trainer's `fsdp` is true or false since version 2.",
        (_code("memkit check FILE", "names the key and the values that it takes"),),
        "transformers 5.23.0: training_args.py 2835, 2927, 2938; accelerate 1.15.0: utils/dataclasses.py 1956-1970",
        rule="fsdp-wrong-value",
    ),
    Failure(
        "device-map",
        r"You can't train a model that has been loaded with `?device_map='auto'`? in any distributed mode",
        ("in any distributed mode",),
        "The model was spread over the GPUs before a job with several processes",
        "device_map='auto' places layers on all GPUs; here each process has one GPU.",
        (
            _code("delete device_map", "FSDP and DeepSpeed place the weights"),
            _code("device_map={'': PartialState().process_index}", "with DDP, or with 4-bit weights"),
        ),
        "accelerate 1.15.0: accelerator.py 1819; github.com/huggingface/accelerate/issues/2311",
        cause="several processes",
    ),
    # Checkpoints
    Failure(
        "fsdp-sharded-save", r"save_only_model option is not compatible with FSDP state dict type",
        ("save_only_model option",),
        "Trainer refuses save_only_model with FSDP's shards",
        "A checkpoint of the model only is for from_pretrained, which reads whole weights.",
        (_WHOLE, _argument("save_only_model", "false", "keeps shards, which `accelerate merge-weights` merges")),
        "transformers 5.23.0: trainer.py 907-912; github.com/huggingface/transformers/issues/36626",
        rule="fsdp-saves-no-weights",
    ),
    Failure(
        "fsdp-saved-shards", r"Attempted to access the data pointer on an invalid python storage",
        ("invalid python storage",),
        "A save met sharded weights",
        "model.save_pretrained() writes what the model holds, which with FSDP2 are shards (DTensors).",
        (
            _SAVE_MODEL,
            _code("accelerator.get_state_dict(model)", "in your own loop: give its result to "
                  "save_pretrained(folder, state_dict=…)"),
        ),
        "safetensors: torch.py; transformers 5.23.0 with fully_shard", seen=("FSDP",),
    ),
    Failure(
        "shards-in-checkpoint",
        r"copying a param with shape torch\.Size\(\[\d{0,12}\]\) from checkpoint, the shape in current model is "
        r"torch\.Size\(\[\d{1,9}, \d[^\n\]]{0,60}\]\)",
        ("copying a param with shape torch.size([",),
        "The checkpoint has a shard of a weight, or nothing, instead of the weight",
        "One process wrote what it held: FSDP's and ZeRO-3's processes hold flat shards, or empty tensors. The "
        "weights are in the checkpoints of the same run, if they have shards of all ranks.",
        (
            _code("accelerate merge-weights CHECKPOINT/pytorch_model_fsdp_0 OUT", "merges FSDP's shards"),
            _code("python CHECKPOINT/zero_to_fp32.py CHECKPOINT OUT", "merges DeepSpeed's"),
            _SAVE_MODEL,
            _WHOLE,
        ),
        "github.com/huggingface/transformers/issues/34080, github.com/FlagOpen/FlagEmbedding/issues/873",
        rule="fsdp-saves-no-weights", cause="several processes",
    ),
    Failure(
        "fsdp-optimizer-checkpoint", r"Missing key in checkpoint state_dict: optimizer\.state\.",
        ("missing key in checkpoint",),
        "FSDP did not find the optimizer's states in the checkpoint",
        "accelerate 1.12 does not find the names again under which it wrote the shards of the states. Or the "
        "checkpoint is of another optimizer.",
        (
            _code("pip install -U accelerate", "1.15 reads the names that it writes"),
            Remedy("model.from_pretrained", "CHECKPOINT, without resume_from_checkpoint", "trains on from the "
                   "weights, with new states"),
        ),
        "github.com/huggingface/accelerate/issues/3971",
    ),
    # A rank that the others wait for
    Failure(
        "collective-timeout",
        r"Watchdog caught collective operation timeout: WorkNCCL\([^\n]{0,200}"
        r"|Timed out waiting \d{1,12} ?ms for (?:recv|send) operation to complete",
        ("watchdog caught collective", "timed out waiting"),
        "A rank of FSDP waited for the others until the timeout",
        _ABSENT,
        (
            _FIRST_ERROR, _SAVE_MODEL, _LONGER,
            _fsdp("state_dict_type: SHARDED_STATE_DICT", "if it waits in a save: none gathers the whole model"),
        ),
        "github.com/pytorch/pytorch/issues/143536, github.com/huggingface/accelerate/issues/3250",
        seen=("FSDP",), cause="several processes", rank=4,
    ),
    Failure(
        "collective-timeout", "", (),
        "A rank waited for the others until the timeout",
        _ABSENT, (_FIRST_ERROR, _SAVE_MODEL, _LONGER),
        "torch 2.13.0: ProcessGroupNCCL.cpp; github.com/huggingface/accelerate/issues/2912",
        cause="several processes", rank=4,
    ),
)  # fmt: skip
