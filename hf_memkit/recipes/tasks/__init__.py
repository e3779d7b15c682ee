"""Tasks, one module for each kind of data; `task.py` has their interface."""

from __future__ import annotations

from importlib import import_module

from hf_memkit.common.errors import InputError, did_you_mean
from hf_memkit.recipes.task_names import DEFAULT_TASK, TASKS
from hf_memkit.recipes.tasks.task import Task
from hf_memkit.setup.setup import Setup

__all__ = ["DEFAULT_TASK", "TASKS", "Task", "find_task", "task_of"]


def find_task(name: str) -> Task:
    """The task called `name`. Raises InputError if there is none."""
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}{did_you_mean(name, TASKS)}; known: {', '.join(TASKS)}")
    task: Task = import_module(f"{__name__}.{TASKS[name]}").TASK
    return task


def task_of(setup: Setup) -> Task:
    """The task of a recipe's setup."""
    return find_task(str(setup.get("data.task", DEFAULT_TASK)))
