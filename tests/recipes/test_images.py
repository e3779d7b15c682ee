"""The recipe for images, resolved, and its training on real files: collator, workers, metric, several processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import datasets
import pytest

pytest.importorskip("PIL")

from PIL import Image

from hf_memkit.catalog.hardware import Machine
from hf_memkit.common.errors import InputError
from hf_memkit.recipes.export import export_script
from hf_memkit.recipes.export.scripts import image_rows, train_images
from hf_memkit.recipes.export.scripts.job import TrainingJob
from hf_memkit.recipes.rehearse import rehearse
from hf_memkit.recipes.schema import Recipe, load_recipe
from hf_memkit.recipes.variant import needs_less
from hf_memkit.run.folder import RecipeRun
from hf_memkit.run.ranks import ranks_from_environment
from hf_memkit.run.training import run
from hf_memkit.setup.request import Request
from tests.recipes.resolving import resolve


@pytest.fixture(scope="module")
def images() -> Recipe:
    return load_recipe("vit-large-on-8gb")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Red and blue ones, ten each, of different sizes."""
    for label, colour in (("blue", (20, 20, 200)), ("red", (200, 20, 20))):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (40 + number, 60), colour).save(tmp_path / "photos" / label / f"{number}.jpg")
    return tmp_path / "photos"


def rehearsal(images: Recipe, machine: Machine, photos: Path, output: Path) -> RecipeRun:
    request = Request(variant="8bit", data=str(photos), max_steps=3, output=str(output))
    resolved = resolve(images, machine, request, use_hub=False)
    rehearsed = rehearse(images, resolved)
    return RecipeRun(
        "vit-large-on-8gb", "8bit", rehearsed.setup, target=resolved, not_rehearsed=rehearsed.not_rehearsed
    )


def test_the_config_decides_the_length(images: Recipe, small_gpu: Machine) -> None:
    resolved = resolve(images, small_gpu, Request(variant="8bit"), use_hub=False)
    assert resolved["data.sequence_length"] == 197
    assert resolved.resolved_for.model.parameters == pytest.approx(303.3e6, rel=1e-3)
    assert resolved.resolved_for.model.model_class == "ViTForImageClassification"
    assert "model_parts.chunked_loss" not in resolved
    with pytest.raises(InputError) as caught:
        resolve(images, small_gpu, Request(variant="8bit", sequence_length=512), use_hub=False)
    assert str(caught.value).startswith("--sequence-length 512: ")
    assert "197 tokens" in str(caught.value) and "\n" not in str(caught.value)


def test_it_trains_on_files_and_counts_right_answers(
    images: Recipe, small_gpu: Machine, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    messages: list[str] = []
    job = rehearsal(images, small_gpu, photos, tmp_path / "run")
    write = partial(export_script, job, tmp_path / "run")
    content = run(job, messages.append, ranks_from_environment(), write=write)
    assert messages[-1].startswith(f"Data: {photos}: 19 examples to train on, 1 held out")
    result = content["result"]
    assert result["held_out_loss"] is not None and set(result["metrics"]) >= {"accuracy"}
    assert 0 <= result["metrics"]["accuracy"] <= 1
    config = (tmp_path / "run" / "model" / "config.json").read_text()
    assert '"red": 1' in config and "ignore_mismatched_sizes" not in config
    assert (tmp_path / "run" / "model" / "preprocessor_config.json").exists(), "whoever loads the model needs it"


def test_out_of_memory_names_options_that_images_take(
    images: Recipe, small_gpu: Machine, photos: Path, tmp_path: Path
) -> None:
    """Would notice: --sequence-length, which their recipes refuse."""
    options = needs_less(images, rehearsal(images, small_gpu, photos, tmp_path / "run").setup)
    assert "--variant resident" in options and not [each for each in options if "--sequence-length" in each]


def test_an_export_reads_the_same_files(images: Recipe, small_gpu: Machine, photos: Path, tmp_path: Path) -> None:
    """tests/recipes/test_rows.py has the other forms."""
    source, held_out = tmp_path / "parts", tmp_path / "parts" / "validation" / "red"
    held_out.mkdir(parents=True)
    photos.rename(source / "train")
    Image.new("RGB", (40, 40)).save(held_out / "1.png")
    job = rehearsal(images, small_gpu, source, tmp_path / "run")
    written = {path.name for path in export_script(job, tmp_path / "script")}
    scripts = {"train_images.py", "job.py", "image_rows.py", "rows.py", "image_batches.py"}
    scripts |= {"resuming.py", "stopping.py"}
    assert written - {"fp32_products.py"} == scripts | {"args.yaml", "memkit-run.json"}
    script = TrainingJob(tmp_path / "script")
    rows, first = image_rows.read(script.source)
    assert rows.features["label"].names == ["blue", "red"]
    train, evaluated = train_images.hold_out(script, rows, first)
    assert len(train) == 20
    assert all(train["augment"]) and not any(evaluated["augment"])
    paths = {row["image"]["path"] for row in train}
    assert all(Path(path).is_file() for path in paths) and len(paths) == len(train)
