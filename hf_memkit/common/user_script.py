"""Run a user's training script as Python would. `memkit run` and `memkit predict` give their process to the script:
`__main__`, `__file__`, `sys.argv` and `sys.path[0]` are those of `python SCRIPT ARGUMENTS` or `python -m MODULE
ARGUMENTS`. Its objects can therefore be pickled, also for spawned workers."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path

from hf_memkit.common.errors import InputError
from hf_memkit.common.search_path import restore_current_folder
from hf_memkit.common.user_files import is_there


@dataclass(frozen=True, slots=True)
class UserScript:
    """A script or module with its arguments.

    Attributes:
        target: path of the script, or dotted name of the module.
        is_module: whether `target` is a module's name (`-m`).
        arguments: the arguments after it on the command line.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()

    @classmethod
    def at(cls, target: str, arguments: Sequence[str] = (), *, is_module: bool = False) -> UserScript:
        """The script, after a check that it exists. A module is checked when it is run, because the check imports its
        package. Raises InputError if there is no such file, it is a notebook, or a folder without `__main__.py`."""
        if not is_module:
            path = Path(target)
            if not is_there(path):
                raise InputError(f"{target}: no such file; write the path of your training script")
            if path.suffix == ".ipynb":
                calls = "hf_memkit.predict_trainer(trainer, gpu=…), or hf_memkit.attach(trainer) for a report"
                raise InputError(f"{target}: a notebook. In the notebook, before trainer.train(), call {calls}")
            if path.is_dir() and not (path / "__main__.py").exists():
                raise InputError(f"{target}: a folder without __main__.py; write the path of a script in it")
        return cls(target, is_module, tuple(arguments))

    def __str__(self) -> str:
        return f"-m {self.target}" if self.is_module else self.target

    @property
    def name(self) -> str:
        """`"train.py"` or `"-m trl.scripts.sft"`: its name in messages, without its folder."""
        return str(self) if self.is_module else Path(self.target).resolve().name

    def run(self) -> None:
        """Run the script in this process. Exceptions of the script, also SystemExit, are not caught."""
        code = self.take_over()
        exec(code, vars(sys.modules["__main__"]))

    def take_over(self) -> types.CodeType:
        """Set up this process for the script. Returns the code to execute in `__main__`.

        Raises:
            InputError: there is no such module, or it cannot be run.
            SyntaxError: of the script.
        """
        main = types.ModuleType("__main__")
        vars(main).update(__builtins__=builtins, __annotations__={})
        name, code = self._module_code(main) if self.is_module else self._file_code(main)
        sys.modules["__main__"] = main
        sys.argv = [name, *self.arguments]
        return code

    def _file_code(self, main: types.ModuleType) -> tuple[str, types.CodeType]:
        given = Path(self.target)
        path = given / "__main__.py" if given.is_dir() else given
        _put_first_in_path(given.resolve() if given.is_dir() else given.resolve().parent)
        file = str(path.absolute())
        vars(main).update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
        # Without `dont_inherit` this module's `from __future__` would be the script's too.
        return self.target, compile(path.read_bytes(), file, "exec", dont_inherit=True)

    def _module_code(self, main: types.ModuleType) -> tuple[str, types.CodeType]:
        _put_first_in_path(Path.cwd())
        spec = _spec(self.target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _spec(f"{self.target}.__main__")
            if spec is None:
                why = "a package without __main__.py"
                raise InputError(f"-m {self.target}: {why}. Name a module in it: -m {self.target}.MODULE")
        if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
            raise InputError(f"-m {self.target}: no such module. Check its name, and the folder that you are in")
        code = spec.loader.get_code(spec.name)
        if code is None:
            raise InputError(f"-m {self.target}: no Python code to run; name a module that is a .py file")
        vars(main).update(__file__=spec.origin, __cached__=spec.cached, __spec__=spec)
        vars(main).update(__package__=spec.parent, __loader__=spec.loader)
        return str(spec.origin), code


def _put_first_in_path(folder: Path) -> None:
    """Replace memkit's folder, the first of `sys.path`. With `python -P` there is none to replace."""
    restore_current_folder()
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)


def _spec(module: str) -> ModuleSpec | None:
    if module.startswith(".") or module == "__main__":
        return None
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return None
        raise  # its package imports a missing module
