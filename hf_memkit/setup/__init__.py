"""From what was asked for (`request.py`) to what Trainer takes: a setup (`setup.py`), a value that is never changed.

`techniques/` put their settings into it; `build/` makes TrainingArguments, the model and Trainer's arguments of it.
"""
