"""A local path in, its images with their labels out, every file opened once.

Three forms are read: a folder with a folder a label (`cats/1.jpg`), the same below `train/` and `validation/`, and a
table with the columns `image` (a path, from the table's folder) and `label`, as a file or, with the column `file_name`
as Hugging Face's ImageFolder has it, as `metadata.csv` or `metadata.jsonl` in the folder of the images.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import DataError
from hf_memkit.recipe.tables import find_tables, read_rows
from hf_memkit.recipe.tasks.media import checked, column_of, files_in, only_table, told_at_once
from hf_memkit.recipe.text_readers import in_one_line, name_of

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

LOCAL_FORM: Final = "a folder with a folder of images for each label, or a table with the columns image and label"
EXAMPLE: Final = "photos/cat/1.jpg, photos/dog/1.jpg"
_ROW: Final = '{"image": "cat/1.jpg", "label": "cat"}'

_TRAIN: Final = ("train", "training")
_HELD_OUT: Final = ("validation", "val", "valid", "dev", "eval")
_TEST: Final = ("test", "testing")


@dataclass(frozen=True)
class ImageFile:
    """`where` is what messages call it: its path, or the row that names it."""

    path: str
    label: str
    held_out: bool
    where: str


@dataclass(frozen=True)
class ImageFiles:
    """`labels` are sorted, and number i is that of the i-th; `has_held_out`: the data brings its own held-out part."""

    files: tuple[ImageFile, ...]
    labels: tuple[str, ...]
    has_held_out: bool
    source: str


def list_images(path: Path, columns: Mapping[str, str]) -> ImageFiles:
    """The images at `path`; none of them is opened.

    Raises:
        DataError: none, or they are not laid out in one of the forms; tells all of it at once.
    """
    if not path.is_dir():
        if path.suffix.lower() in SUFFIXES:
            raise DataError(f"{path}: one image; expected {LOCAL_FORM}, such as {EXAMPLE}")
        return _from_table(path, columns)
    table = only_table(path, files_in(path)[1])
    return _from_folders(path) if table is None else _from_table(table, columns)


def check_image(file: ImageFile) -> str:
    """SHA-256 of the file, which was decoded as a whole.

    Raises:
        DataError: it cannot be read, or is no image.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        content = Path(file.path).read_bytes()
        if not content:
            raise DataError(f"{file.where}: empty (0 bytes); expected an image")
        check_bytes(content)
    except UnidentifiedImageError as error:
        raise DataError(f"{file.where}: not an image that pillow can read. Save it again, or remove it") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = getattr(error, "strerror", None) or in_one_line(error)
        raise DataError(f"{file.where}: cannot be read: {why}. Save it again, or remove it") from error
    return hashlib.sha256(content).hexdigest()


def check_bytes(content: bytes) -> None:
    """Decodes an image as a whole.

    Raises:
        OSError: it is none, or a part of it is missing.
    """
    import io

    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images and strange metadata
        with Image.open(io.BytesIO(content)) as image:
            image.draft("RGB", (image.width // 8, image.height // 8))  # JPEG: all of it is read, an eighth is computed
            image.load()


def image_rows(files: tuple[ImageFile, ...], labels: tuple[str, ...], **stamps: object) -> Iterator[dict[str, Any]]:
    """A row of each file that was opened and found good. `stamps` only make the cache tell files apart.

    Raises:
        DataError: some cannot be used; names them.
    """
    numbers = {label: number for number, label in enumerate(labels)}
    for file, digest in checked(files, lambda file: (file, check_image(file)), "images cannot be used"):
        image = {"bytes": None, "path": file.path}
        yield {"image": image, "label": numbers[file.label], "held_out": file.held_out, "sha256": digest}


def _from_folders(root: Path) -> ImageFiles:
    folders, files = files_in(root)
    if not folders:
        what = "it is empty"
        if any(file.suffix.lower() in SUFFIXES for file in files):
            what = "it has images, and no folder for each label"
        elif files:
            what = f"it has no image, only {files[0].name}{' …' * (len(files) > 1)}"
        raise DataError(f"{root}: no labels: {what}; expected {LOCAL_FORM}, such as {EXAMPLE}")
    if (split := _splits(folders)) is not None:
        return _from_splits(root, split, files)
    listed, problems = _labelled(folders, held_out=False)
    problems = [*(_stray(file, root) for file in files), *problems]
    return _finish(listed, problems, str(root), has_held_out=False)


def split_folders(root: Path) -> tuple[Path, Path] | None:
    """(folder to train on, folder that is held out), where the data brings both."""
    split = _splits(files_in(root)[0])
    return None if split is None or split[1] is None else (split[0], split[1])


def _splits(folders: list[Path]) -> tuple[Path, Path | None] | None:
    """(`train`, `validation` or else `test`) where all folders are such parts."""
    names = {folder.name.lower(): folder for folder in folders}
    if any(name not in (*_TRAIN, *_HELD_OUT, *_TEST) for name in names):
        return None
    train = next((names[name] for name in _TRAIN if name in names), None)
    other = next((names[name] for name in (*_HELD_OUT, *_TEST) if name in names), None)
    return None if train is None else (train, other)


def _from_splits(root: Path, split: tuple[Path, Path | None], files: list[Path]) -> ImageFiles:
    """The labels below the folder to train on and the one that is held out."""
    train, other = split
    problems = [_stray(file, root) for file in files]
    listed: list[ImageFile] = []
    for folder, held_out in ((train, False), (other, True)):
        if folder is None:
            continue
        inside, stray = files_in(folder)
        problems += [_stray(file, folder) for file in stray]
        if not inside:
            problems.append(f"{folder}: no folder in it; expected one for each label, such as {folder.name}/cat/1.jpg")
        found, wrong = _labelled(inside, held_out=held_out)
        problems += wrong
        listed += found
    known = {file.label for file in listed if not file.held_out}
    for label in dict.fromkeys(file.label for file in listed if file.held_out and file.label not in known):
        problems.append(
            f"{other}: label {label!r} is not among the labels of {train} ({', '.join(sorted(known)) or 'none'})"
        )
    return _finish(listed, problems, str(root), has_held_out=other is not None)


def _labelled(folders: list[Path], *, held_out: bool) -> tuple[list[ImageFile], list[str]]:
    """(the images of label folders, what is wrong with them)."""
    listed: list[ImageFile] = []
    problems = []
    for folder in folders:
        deeper, files = files_in(folder)
        if deeper:
            problems.append(
                f"{deeper[0]}: a folder inside the label {folder.name!r}; expected its images directly in {folder}"
            )
        images = [file for file in files if file.suffix.lower() in SUFFIXES]
        problems += [_no_image(file) for file in files if file.suffix.lower() not in SUFFIXES]
        if not images and not deeper:
            problems.append(f"{folder}: no image of the label {folder.name!r}; put some in, or remove the folder")
        listed += [ImageFile(str(file.resolve()), folder.name, held_out, str(file)) for file in images]
    return listed, problems


def _stray(file: Path, root: Path) -> str:
    if file.suffix.lower() in SUFFIXES:
        return f"{file}: an image beside the label folders of {root}; move it into the folder of its label"
    return _no_image(file)


def _no_image(file: Path) -> str:
    ending = file.suffix or "no ending"
    return f"{file}: not an image ({ending}); expected {', '.join(SUFFIXES)}; convert it, or move it out of the folder"


def _from_table(path: Path, columns: Mapping[str, str]) -> ImageFiles:
    tables = find_tables(path, f"{LOCAL_FORM}, such as {_ROW}")
    folder = path.parent
    listed: list[ImageFile] = []
    problems: list[str] = []
    places: dict[str, ImageFile] = {}
    for where, row in read_rows(tables.paths[0], tables.kind):
        image = column_of(where, row, (columns["image"], "file_name"), _ROW)
        label = column_of(where, row, (columns["label"],), _ROW)
        if isinstance(row[image], (list, dict)) or row[image] in (None, ""):
            problems.append(f"{where}: column {image!r}: expected a path, found {name_of(row[image])}; such as {_ROW}")
        elif not _is_label(row[label]):
            found = name_of(row[label])
            problems.append(f"{where}: column {label!r}: expected a label's name, found {found}; such as {_ROW}")
        else:
            file = folder / str(row[image])
            found_file = ImageFile(str(file.resolve()), str(row[label]).strip(), False, f"{where}: {row[image]}")
            if not file.is_file():
                problems.append(f"{where}: {row[image]}: no such file in {folder}")
            elif (earlier := places.setdefault(found_file.path, found_file)) is not found_file:
                labels = (
                    "" if earlier.label == found_file.label else f", as {found_file.label!r} and {earlier.label!r}"
                )
                problems.append(f"{where}: {row[image]} appears again{labels}. Remove one of the rows")
            else:
                listed.append(found_file)
    if not listed and not problems:
        raise DataError(f"{path}: it has no rows; expected {LOCAL_FORM}, such as {_ROW}")
    return _finish(listed, problems, str(path), has_held_out=False)


def _is_label(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return False
    return bool(str(value).strip())


def _finish(listed: list[ImageFile], problems: list[str], source: str, *, has_held_out: bool) -> ImageFiles:
    if problems:
        raise told_at_once(problems, len(listed) + len(problems), "places are wrong")
    names = {file.label for file in listed}
    if len(names) < 2:
        only = f"all {len(listed)} images have the label {names.pop()!r}" if names else "no image"
        raise DataError(f"{source}: {only}; the minimum is 2 labels, such as {EXAMPLE}")
    numbers = all(name.isdecimal() for name in names)
    labels = tuple(sorted(names, key=int) if numbers else sorted(names))
    told = f"{source} ({len(listed)} images, {len(labels)} labels)"
    return ImageFiles(tuple(listed), labels, has_held_out, told)
