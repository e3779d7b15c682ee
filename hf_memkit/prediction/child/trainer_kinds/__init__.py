"""Special cases of Trainer classes, one file per kind. `docs/contributing.md` says how to add one."""
