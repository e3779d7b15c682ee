"""Setup → the objects that train: TrainingArguments, model, its components, Trainer's keyword arguments. The order
matters: TrainingArguments first and kept alive, because under ZeRO-3 they make `from_pretrained` and `from_config`
split the weights at creation (transformers:src/transformers/integrations/deepspeed.py)."""

from hf_memkit.setup.build.model import add_adapters, build_model, refuse_random_weights, why_not_loaded
from hf_memkit.setup.build.packages import missing_package, needed_packages, require_packages
from hf_memkit.setup.build.trainer import (
    after_making,
    build_arguments,
    install_model_parts,
    optimizer_class_and_options,
    prepared_rows,
    trainer_class,
    trainer_options,
)

__all__ = [
    "add_adapters", "after_making", "build_arguments", "build_model", "install_model_parts", "missing_package",
    "needed_packages", "optimizer_class_and_options", "prepared_rows", "refuse_random_weights", "require_packages",
    "trainer_class", "trainer_options", "why_not_loaded",
]  # fmt: skip
