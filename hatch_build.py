"""README.md as PyPI shows it: its relative links lead to GitHub."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        files = f"{metadata['urls']['Source']}/blob/main/"
        text = re.sub(r"\]\((?!\w+:|#)", f"]({files}", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
