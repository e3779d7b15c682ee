"""`memkit run`: an unchanged training script, with a memory report."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hf_memkit.errors import InputError
from hf_memkit.planned_run import PlannedRun
from hf_memkit.run_script import ScriptRun, predicted
from hf_memkit.user_files import user_path
from hf_memkit.user_script import UserScript

__all__ = ["EXAMPLES", "RunCommand", "run"]

EXAMPLES = """[bold]Examples[/bold]

  memkit run train.py -- --output_dir out    as `python train.py --output_dir out`, with a report in out

  memkit run -m my_package.train -- …        as `python -m my_package.train …`

  memkit run --plan plan.yaml train.py -- …  with the plan's settings, which override the script's

  torchrun --nproc_per_node 4 -m hf_memkit run train.py -- …     also: accelerate launch -m hf_memkit run …,
  deepspeed --module hf_memkit run …
"""


class RunCommand(TyperCommand):
    """Where there is a `--`, memkit's options stand before it. Without one all that stands behind the script's name
    is the script's, as after `python`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = "--" in args
        return super().parse_args(ctx, args)


def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Path of the script; with -m, a module's dotted name.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="Arguments of the script.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module name, as after `python -m`.")] = False,
    records: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder for records and page. Default: the Trainer's output_dir."),
    ] = None,
    log: Annotated[
        str, typer.Option(metavar="few|all|none", help="Memory figures added to the Trainer's logs and dashboards.")
    ] = "few",
    predict: Annotated[
        bool,
        typer.Option("--predict", help="Predict the script first. The report compares predicted and measured."),
    ] = False,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Override the script's settings with a plan's: fields of TrainingArguments, options of "
            "from_pretrained, environment variables. Prints each override; warns where the script's value remains.",
        ),
    ] = None,
    phases: Annotated[
        bool,
        typer.Option(
            " /--no-phases", show_default=False, help="Do not reset torch's peak counter, for a script that reads it."
        ),
    ] = True,
) -> ScriptRun:
    """Run a training script unchanged and report its memory."""
    if log not in (allowed := ("few", "all", "none")):
        raise InputError(f"--log {log}: unknown. Give one of {', '.join(allowed)}.")
    folder = user_path(records).absolute() if records is not None else None  # the script may change its folder
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InputError(f"--records {records}: a file. Give a folder.")
    if plan is not None and predict:
        raise InputError("--predict, --plan: mutually exclusive. Omit --predict: the plan has its prediction.")
    planned = PlannedRun.read(plan) if plan is not None else None
    # A launcher gives it to the script as its first argument.
    launched = context.find_root().params
    by_launcher = {"--local_rank": launched["local_rank"], "--local-rank": launched["local_rank_of_torch"]}
    given = [*(f"{name}={rank}" for name, rank in by_launcher.items() if rank is not None), *(arguments or ())]
    found = UserScript.found(script, given, is_module=module)
    options = {"output_dir": folder, "log": log, "phases": phases, "summary": "stderr"}
    prediction = predicted(found) if predict else planned.prediction if planned is not None else None
    return ScriptRun(found, {**options, "prediction": prediction}, planned)
