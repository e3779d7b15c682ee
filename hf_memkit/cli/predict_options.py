"""Options of `memkit predict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from hf_memkit.cli.options import MORE, Nodes
from hf_memkit.cli.training_options import NO_SCRIPT, TrainingOptions
from hf_memkit.common.errors import InputError
from hf_memkit.setup.request import Request

if TYPE_CHECKING:
    from hf_memkit.recipes.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class PredictOptions(TrainingOptions):
    data: Annotated[
        str | None,
        typer.Option(help="With --recipe: your data; its worst batch is predicted.", rich_help_panel=NO_SCRIPT),
    ] = None
    technique: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --model: use this technique instead of the preset's for the same purpose. Repeatable.",
            rich_help_panel=NO_SCRIPT,
        ),
    ] = None
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs on each machine. Default: the command's or recipe's, or 1.")
    ] = None
    nodes: Nodes = 1
    compare_with: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="With SCRIPT: Python of another environment. Compares the memory that its libraries need.",
            rich_help_panel=MORE,
        ),
    ] = None
    no_search: Annotated[
        bool, typer.Option("--no-search", help="With SCRIPT: if it does not fit, search for no setup that does.")
    ] = False

    def refuse_contradictions(self) -> None:
        if self.html is not None and self.compare_with is not None:
            raise InputError("--html, --compare-with: mutually exclusive: a page shows one prediction. Omit one.")
        self.refuse_wrong_subject("predict")
        for option, value in (("--compare-with PATH", self.compare_with), ("--no-search", self.no_search)):
            if value and self.script is None:
                raise InputError(
                    f"{option.split()[0]}: needs a training script: memkit predict train.py {option} -- ARGUMENTS"
                )

    def request(self) -> tuple[Recipe | None, Request]:
        """The recipe if there is one, and the request of a training without a script."""
        request = Request(
            data=self.data, gpu=self.gpu, gpu_memory=self.gpu_memory, ram=self.ram, gpus=self.gpus, nodes=self.nodes
        )
        return self.read(request, tuple(self.technique or ()))
