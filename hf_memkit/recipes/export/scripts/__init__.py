"""The scripts that `--export` copies, one a task, and what they share (`job.py`). They read the `args.yaml` beside
them; their imports from memkit, that of its callback apart, are of files that are copied with them."""
