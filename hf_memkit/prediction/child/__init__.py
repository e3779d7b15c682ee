"""What runs in the child process only: a real Trainer on fake tensors, and what has to be replaced for that.

Nothing here may be imported where training happens: these modules change torch, transformers and accelerate for the
whole process, which is then left by `os._exit`. `serve.py` is the process's entry; `script.py` runs one case.
"""
