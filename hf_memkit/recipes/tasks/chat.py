"""Chat: conversations, for TRL's SFTTrainer; the loss is computed on the assistant's turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hf_memkit.recipes.tasks.task import END_OF_TEXT, Framing, Settings, Task
from hf_memkit.setup.setup import Setup

if TYPE_CHECKING:
    from hf_memkit.recipes.schema import Data


_PACKED: Final = "short conversations share a sequence, and each sees only itself (trl: packing_strategy bfd)"
_NOT_PACKED: Final = "each conversation is one sequence, padded to the longest of its micro-batch"


class _Chat(Task):
    name: ClassVar[str] = "chat"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    trainer_class: ClassVar[str] = "trl:SFTTrainer"
    arguments_class: ClassVar[str] = "trl:SFTConfig"
    further_arguments: ClassVar[Mapping[str, Any]] = {"packing": bool, "assistant_only_loss": bool}
    columns: ClassVar[Mapping[str, str]] = {"messages": "messages"}
    local_form: ClassVar[str] = "a file of conversations in JSON lines or parquet, or a folder of one kind of them"
    script: ClassVar[str] = "train_chat"
    rows: ClassVar[str] = "chat_rows"
    script_needs: ClassVar[tuple[str, ...]] = ("trl",)
    script_reads: ClassVar[tuple[str, ...]] = ()

    def arguments(self, data: Data) -> Settings:
        learns = "the model learns to answer, not to ask: loss on the assistant's turns only"
        return {
            "assistant_only_loss": (True, f"{learns} (a prediction counts every token)"),
            "packing": (data.packing, _PACKED if data.packing else _NOT_PACKED),
        }

    def with_derived_settings(self, setup: Setup) -> Setup:
        # Both are on by default in SFTConfig (trl 1.16.0: base_config.py).
        for key in ("activation_checkpointing", "bf16"):
            if f"arguments.{key}" not in setup:
                setup = setup.put(f"arguments.{key}", False, "as the variant has it; SFTConfig's default is on")
        length = setup["data.sequence_length"]
        if setup["arguments.packing"] and "flash" not in str(setup.get("model.attn_implementation")):
            tokens = int(setup["arguments.per_device_train_batch_size"]) * int(length)
            # TRL joins the rows of a micro-batch into one (sft_trainer.py, `padding_free`).
            mask = (
                f"{_PACKED}; without flash attention by a mask of the micro-batch's {tokens} × {tokens} tokens, a "
                "byte each, and all of them are compared: prefer a micro-batch of 1"
            )
            setup = setup.put("arguments.packing", True, mask)
        return setup.put("arguments.max_length", length, "data.sequence_length: longer conversations are cut")

    def padded_columns(self, setup: Setup) -> tuple[str, ...]:
        return () if setup["arguments.packing"] else ("input_ids",)

    def framing(self, setup: Setup) -> Framing:
        # ChatML: the end of a turn ends generation.
        return Framing({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": END_OF_TEXT})

    def examples(self) -> Iterator[dict[str, Any]]:
        from hf_memkit.recipes.tasks.chat_made_up import made_up_conversations

        return ({"messages": messages} for messages in made_up_conversations())


TASK = _Chat()
