"""Pages are opened in a real browser."""

from tests.chromium import browser, show  # noqa: F401
