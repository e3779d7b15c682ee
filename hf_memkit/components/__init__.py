"""Parts that no library has, installed on live objects when training begins: one `NAME.py` each, a long one with
further files `NAME_….py`.

Each part is self-contained: it imports the standard library, torch, transformers and the library it is for, and
nothing of memkit, because `memkit recipe --export` copies it beside the exported script. Two forms:

- a model part has `install(model, **options) -> undo`: changes that one model, and `undo()` reverts them;
- a trainer part has `trainer_options(*, model, processing_class, arguments, **options)`: keyword arguments for
  `transformers.Trainer`, such as `data_collator` or `callbacks`.

A setup names them as `model_parts.NAME` and `trainer_parts.NAME`, with their options as the value.
"""
