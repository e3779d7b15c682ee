from tests.tiny_trainer import allocator, losses, make_trainer, new_model, on_cpu  # noqa: F401  fixtures
