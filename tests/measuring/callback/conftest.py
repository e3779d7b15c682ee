from tests.measuring.recorded import bare, measured, recorded  # noqa: F401  fixtures
from tests.tiny_trainer import allocator, make_trainer  # noqa: F401  fixtures
