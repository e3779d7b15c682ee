"""The recipe for speech, resolved, and its training on real files: collator, generation, word errors, accumulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest

from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.errors import DataError, InputError
from hf_memkit.components import mean_loss
from hf_memkit.recipes.export import export_script
from hf_memkit.recipes.export.scripts import speech_rows
from hf_memkit.recipes.export.scripts.job import TrainingJob
from hf_memkit.recipes.rehearse import rehearse
from hf_memkit.recipes.schema import Recipe, load_recipe
from hf_memkit.recipes.tasks.made_up_speech import made_up_speech
from hf_memkit.run.folder import RecipeRun
from hf_memkit.run.ranks import ranks_from_environment
from hf_memkit.run.training import run
from hf_memkit.setup.request import Request
from tests.recipes.resolving import resolve


@pytest.fixture(scope="module")
def speech() -> Recipe:
    return load_recipe("whisper-small-on-8gb")


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    lines = ["file_name,text"]
    for number, row in enumerate(made_up_speech(6)):
        (folder / f"{number:02}.wav").write_bytes(row["audio"]["bytes"])
        lines.append(f"{number:02}.wav,{row['text']}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


def rehearsal(speech: Recipe, machine: Machine, clips: Path, output: Path) -> RecipeRun:
    request = Request(variant="8bit", data=str(clips), max_steps=1, output=str(output))
    resolved = resolve(speech, machine, request, use_hub=False)
    rehearsed = rehearse(speech, resolved)
    return RecipeRun(
        "whisper-small-on-8gb", "8bit", rehearsed.setup, target=resolved, not_rehearsed=rehearsed.not_rehearsed
    )


def _run(job: RecipeRun, say: Callable[[str], None]) -> dict[str, Any]:
    return run(job, say, ranks_from_environment(), write=partial(export_script, job, Path(job.output)))


def test_a_transcript_with_too_many_tokens(
    speech: Recipe, small_gpu: Machine, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: a model that fails at its first batch; a folder that a run that never began leaves behind."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (clips / "06.wav").write_bytes((clips / "00.wav").read_bytes())
    with (clips / "metadata.csv").open("a") as table:
        table.write(f"06.wav,{'one two ' * 400}\n")
    with pytest.raises(DataError, match=r"06\.wav: its transcript has more than"):
        _run(rehearsal(speech, small_gpu, clips, tmp_path / "run"), print)
    assert not (tmp_path / "run").exists()


def test_the_decoder_limits_the_length(speech: Recipe, small_gpu: Machine) -> None:
    resolved = resolve(speech, small_gpu, Request(variant="8bit", sequence_length=448), use_hub=False)
    assert resolved["arguments.generation_max_length"] == 448
    assert resolved.resolved_for.model.parameters == pytest.approx(241.7e6, rel=1e-3)
    with pytest.raises(InputError, match=r"--sequence-length 449: .* at most 448 tokens. Give 448 or less"):
        resolve(speech, small_gpu, Request(variant="8bit", sequence_length=449), use_hub=False)


@pytest.mark.slow
def test_it_trains_on_files_and_counts_wrong_words(
    speech: Recipe, small_gpu: Machine, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    messages: list[str] = []
    content = _run(rehearsal(speech, small_gpu, clips, tmp_path / "run"), messages.append)
    assert messages[-1].startswith(f"Data: {clips}: 5 examples to train on, 1 held out")
    assert "word_error_rate" in content["result"]["metrics"]
    from transformers import WhisperProcessor

    processor = WhisperProcessor.from_pretrained(tmp_path / "run" / "model", local_files_only=True)
    assert (
        processor.tokenizer.decode(processor.tokenizer("one two")["input_ids"], skip_special_tokens=True) == "one two"
    )


def test_accumulation_gives_the_loss_of_the_whole_batch(tmp_path: Path) -> None:
    """Without the part Trainer reports, and steps with, a loss that is as many times too large."""
    from transformers import Trainer, TrainingArguments, WhisperConfig, WhisperForConditionalGeneration, set_seed

    config = WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=32, max_source_positions=10, max_target_positions=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=2, num_mel_bins=4,
    )  # fmt: skip
    rows = [{"input_features": [[0.1 * number] * 20] * 4, "labels": [3, 4, 5, number]} for number in range(8)]

    def loss(micro_batch: int, part: bool) -> float:
        set_seed(0)
        model = WhisperForConditionalGeneration(config)
        if part:
            undo = mean_loss.install(model)
            undo()
            assert "accepts_loss_kwargs" not in vars(model)
            mean_loss.install(model)
        arguments: dict[str, Any] = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 1}
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=str(tmp_path), per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=8 // micro_batch, disable_tqdm=True, **arguments,
            ),
            train_dataset=rows,
        )  # fmt: skip
        return float(trainer.train().training_loss)

    whole = loss(8, part=True)
    assert loss(2, part=True) == pytest.approx(whole, rel=1e-4)
    assert loss(2, part=False) == pytest.approx(4 * whole, rel=1e-4)


def test_an_export_reads_the_same_files(speech: Recipe, small_gpu: Machine, clips: Path, tmp_path: Path) -> None:
    job = rehearsal(speech, small_gpu, clips, tmp_path / "run")
    written = {path.name for path in export_script(job, tmp_path / "script")}
    assert written >= {f"{name}.py" for name in (
        "train_speech", "job", "speech_batches", "speech_batches_sound", "mean_loss", "whisper_tokenizer",
    )}  # fmt: skip
    script = TrainingJob(tmp_path / "script")
    train, evaluated = script.hold_out(speech_rows.read(script.source))
    assert (len(train), len(evaluated)) == (5, 1)
    first = train[0]
    assert first["audio"]["path"] == str(clips / "00.wav") and first["text"] == made_up_speech(1)[0]["text"]
