"""The scripts that `--export` copies, one a task, and their shared code (`job.py`). They read the `args.yaml` next to
them; except for memkit's callback, the files that they import from memkit are copied with them."""
