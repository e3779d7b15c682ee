"""What is special about a class of Trainer, a file a kind. `docs/contributing.md` says how to add one."""
