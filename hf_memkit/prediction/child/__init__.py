"""Code of the child process: runs a real Trainer on fake tensors, with the replacements that this needs.

Never import it where training happens: these modules change torch, transformers and accelerate for the whole process,
which then ends with `os._exit`. `serve.py` is the entry of the process; `script/script.py` runs one case.
"""
