"""Fields of TrainingArguments that a recipe's variant answers for, or would ignore: `--set` of them is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hf_memkit.errors import SettingError
from hf_memkit.own_arguments import below_one
from hf_memkit.training_setup import TrainingSetup

__all__ = ["ELSEWHERE", "refuse_ignored", "refuse_out_of_place"]

ELSEWHERE: Final = {
    "output_dir": "use --output",
    "deepspeed": "it comes from the variant (see ds_configs/)",
    "resume_from_checkpoint": "use --resume",
    "use_cpu": "memkit uses the GPU where there is one",
    "do_train": "a recipe always trains",
    "do_eval": "a recipe evaluates at its end; --set eval_steps=N does so during training too",
}
"""Fields that another option, or the variant, answers for."""


_THE_VARIANT_S = {"activation_checkpointing", "activation_checkpointing_kwargs", "bf16", "fp16"}


def refuse_out_of_place(chosen: Mapping[str, Any]) -> None:
    """Refuses settings that no variant of any recipe takes.

    Raises:
        SettingError: lists them.
    """
    problems = [f"--set {line}" for line in below_one(chosen, "max_steps")]
    for name in sorted(_THE_VARIANT_S & chosen.keys()):
        problems.append(
            f"--set {name}: belongs to the variant, whose needs were computed with it; take another variant"
        )
    if "num_train_epochs" in chosen:
        problems.append(
            "--set num_train_epochs: the recipe counts steps, and it would have no effect; use --max-steps"
        )
    if problems:
        raise SettingError("\n".join(problems))


def refuse_ignored(setup: TrainingSetup, chosen: Mapping[str, Any]) -> None:
    """Refuses settings that the setup's variant would silently ignore, or change behind the user's back.

    Raises:
        SettingError: says which, and why.
    """
    if "optim" not in chosen:
        return
    if "optimizer.class" in setup:
        raise SettingError(
            f"--set optim={chosen['optim']}: variant {setup.preset!r} brings its own optimizer "
            f"({setup['optimizer.class'].split(':')[1]}), and optim would be ignored; take another variant"
        )
    if "deepspeed.config" in setup and not str(chosen["optim"]).startswith("adamw_torch"):
        offloaded = "offload_optimizer" in setup["deepspeed.config"]["zero_optimization"]
        why = (
            "with an offloaded optimizer accelerate replaces it by DeepSpeedCPUAdam, silently"
            if offloaded
            else "the variant's needs were computed with AdamW's states, split among the cards"
        )
        raise SettingError(
            f"--set optim={chosen['optim']}: {why}; variant {setup.preset!r} works with adamw_torch only"
        )
