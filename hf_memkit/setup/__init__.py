"""From a request (`request.py`) to Trainer's arguments: an immutable setup (`setup.py`). `techniques/` put their
settings into it; `build/` makes TrainingArguments, the model and Trainer's arguments from it."""
