"""Options of `memkit predict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from hf_memkit.cli.options import MOST_GPUS, Nodes, more, option
from hf_memkit.cli.training_options import TrainingOptions, no_script
from hf_memkit.common.errors import InputError
from hf_memkit.setup.request import Request

if TYPE_CHECKING:
    from hf_memkit.recipes.schema import Recipe


_TECHNIQUE = no_script(
    "With --model: use this technique instead of the preset's for the same purpose. Repeatable.", metavar="NAME"
)
_GPUS = option("GPUs on each machine. Default: the command's or recipe's, or 1.", min=1, max=MOST_GPUS)
_COMPARE_WITH = more("With SCRIPT: Python of another environment. Compares the memory of both.", metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(TrainingOptions):
    data: Annotated[str | None, no_script("With --recipe: your data; its worst batch is predicted.")] = None
    technique: Annotated[list[str] | None, _TECHNIQUE] = None
    gpus: Annotated[int | None, _GPUS] = None
    nodes: Nodes = 1
    compare_with: Annotated[str | None, _COMPARE_WITH] = None
    no_search: Annotated[bool, option("With SCRIPT: do not search for a setup that fits.", "--no-search")] = False

    def refuse_contradictions(self) -> None:
        if self.html is not None and self.compare_with is not None:
            raise InputError("--html, --compare-with: mutually exclusive: a page shows one prediction. Omit one.")
        self.refuse_wrong_subject("predict")
        for flag, value in (("--compare-with PATH", self.compare_with), ("--no-search", self.no_search)):
            if value and self.script is None:
                name = flag.split()[0]
                raise InputError(f"{name}: needs a training script. Write memkit predict train.py {flag} -- ARGUMENTS")

    def request(self) -> tuple[Recipe | None, Request]:
        """(the recipe if there is one, the request for a training without a script)."""
        names = ("data", "gpu", "gpu_memory", "ram", "gpus", "nodes")
        request = Request(**{name: getattr(self, name) for name in names})
        return self.read(request, tuple(self.technique or ()))
