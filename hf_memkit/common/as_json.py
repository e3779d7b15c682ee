"""JSON by Python's own functions: a script that memkit predicts may replace them in its process (`json.dumps = …`)."""

from __future__ import annotations

import json
from typing import Any, Final

dumps: Final = json.dumps
loads: Final = json.loads


def as_json(value: Any, **options: Any) -> Any:
    """The value as it comes back from JSON. `options`: of `json.dumps`. Raises TypeError if it is not JSON."""
    return loads(dumps(value, **options))
