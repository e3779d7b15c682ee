"""`memkit run SCRIPT` where Trainer would lose weights of a checkpoint: it stops before training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import Quick


def test_a_training_that_would_lose_weights_does_not_start(
    quick_memkit: Quick, script: Callable[[str], Path], tmp_path: Path
) -> None:
    script("resumes.py")

    def ran(*how: str) -> tuple[int, str]:
        result = quick_memkit("run", "resumes.py", "--", "out", *how)
        return result.returncode, result.stderr

    assert ran()[0] == 0 and (tmp_path / "out" / "checkpoint-2").is_dir()
    records = (tmp_path / "out" / "memory-rank0.jsonl").read_bytes()
    for how, place in (("--resume", "out/checkpoint-2: "), ("--best", "load_best_model_at_end: ")):
        code, text = ran(how)
        (line,) = [each for each in text.splitlines() if each.startswith("memkit: error: ")]
        assert code == 1 and line.startswith(f"memkit: error: {place}") and "Traceback" not in text
        assert "ViTForImageClassification.from_pretrained(" in line
        assert (tmp_path / "out" / "memory-rank0.jsonl").read_bytes() == records, "it has trained"
    code, text = ran("--resume", "--load")
    assert code == 0 and "memkit: error" not in text and (tmp_path / "out" / "checkpoint-4").is_dir()
