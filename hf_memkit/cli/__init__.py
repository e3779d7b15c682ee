"""The command line: one file a verb, each thin. Exit code 0 done, 1 ran and failed, 2 wrong input."""

from hf_memkit.cli.main import main, main_and_exit

__all__ = ["main", "main_and_exit"]
