"""What a resolved recipe will need, before its model is loaded; and the nearest variant that fits."""

from __future__ import annotations

from dataclasses import replace

from hf_memkit.predict import Prediction, predict
from hf_memkit.recipe.resolve import Resolved, resolve

__all__ = ["nearest_that_fits", "predicted"]


def predicted(resolved: Resolved, *, trace: bool = True) -> Prediction:
    """The prediction of the setup for the card in question, which need not be here.

    Raises:
        InputError: nothing can be said of it.
    """
    setup = resolved.setup
    return predict(
        setup,
        model=resolved.model,
        machine=resolved.machine,
        micro_batch_size=int(setup["arguments.per_device_train_batch_size"]),
        accumulation=int(setup.get("arguments.gradient_accumulation_steps", 1)),
        sequence_length=int(setup["data.sequence_length"]),
        gpus=resolved.gpus,
        nodes=resolved.nodes,
        trace=trace,
    )


def nearest_that_fits(resolved: Resolved, *, use_hub: bool, trace: bool = True) -> str | None:
    """The next variant of the recipe that is predicted to fit; None if there is none.

    Args:
        resolved: what does not fit. Variants stand in the order in which a recipe prefers them.
        use_hub: as for `resolve`.
        trace: as for `predicted`.
    """
    names = list(resolved.recipe.variants)
    for name in names[names.index(resolved.variant) + 1 :]:
        other = resolve(resolved.recipe, resolved.machine, replace(resolved.overrides, variant=name), use_hub=use_hub)
        if not other.setup.problems and predicted(other, trace=trace).verdict in ("fits", "tight"):
            return name
    return None
