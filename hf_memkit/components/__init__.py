"""Training components that no library offers, installed on a model or a Trainer when training begins.

A component is one file `NAME.py`; a long one has more files `NAME_….py`. It imports the standard library, torch,
transformers and the library that it extends, and nothing of memkit, because `memkit recipe --export` copies it next to
the exported script. Two kinds:

- a model part has `install(model, **options) -> undo`: changes that one model, and `undo()` reverts them;
- a trainer part has `trainer_options(*, model, processing_class, arguments, **options)`: keyword arguments for
  `transformers.Trainer`, such as `data_collator` or `callbacks`.

A setup names them as `model_parts.NAME` and `trainer_parts.NAME`, with their options as the value.
"""
