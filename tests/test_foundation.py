"""Units, resources, imports, setups, ledgers, hardware: the small parts that everything stands on."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from hf_memkit.catalog import library_versions
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.catalog.hardware import described_gpu, described_machine, named_gpu, this_machine
from hf_memkit.catalog.models import why_no_hub
from hf_memkit.common import resources
from hf_memkit.common.errors import InputError
from hf_memkit.common.units import GIB, MIB, format_size, parse_size
from hf_memkit.setup.ledger import Ledger, Row
from hf_memkit.setup.setup import Setting, Setup

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("text", "size"), [("16GB", 16 * 10**9), ("15.1 GiB", int(15.1 * 2**30)), ("512b", 512), ("1tib", 2**40)]
)
def test_sizes_are_read_by_their_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "16XB", "GB", "-4GB", "1.2.3GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a size"):
        parse_size(text)


def test_a_size_is_above_zero() -> None:
    with pytest.raises(InputError, match="'0GB' must be above 0"):
        parse_size("0GB")


def test_a_size_without_a_unit_gets_one_proposed() -> None:
    with pytest.raises(InputError, match=r"^RAM: '32' has no unit; did you mean 32GB\?$"):
        parse_size("32", "RAM")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (3 * GIB, "3.00 GiB"),
        (GIB // 10 + 1, "0.10 GiB"),
        (GIB // 10 - 1, "102.4 MiB"),
        (MIB, "1.0 MiB"),
        (MIB // 10 - 1, "102.4 KiB"),
        (100, "0.1 KiB"),
        (0, "0.00 GiB"),
    ],
)
def test_a_size_reads_in_its_own_unit(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize("kind", ["recipes", "ds_configs"])
def test_resources_are_found_by_name(kind: str) -> None:
    names = resources.names(kind)
    assert names, f"no {kind} found"
    assert all(resources.find(kind, name).is_file() for name in names)


def test_an_unknown_recipe_gets_a_hint() -> None:
    with pytest.raises(InputError, match="did you mean 'gpt2-on-16gb'"):
        resources.find("recipes", "gpt2-on-16g")


def test_the_wheel_carries_recipes_and_presets(tmp_path: Path) -> None:
    """Built and unpacked for real: an installed package finds them inside itself."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".venv", ".compat", ".git", "*.egg-info", ".*_cache"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    site = tmp_path / "site"
    shutil.unpack_archive(next(tmp_path.glob("*.whl")), site, "zip")
    assert sorted(path.name for path in site.iterdir() if "dist-info" not in path.name) == ["hf_memkit"]
    page = next(site.glob("*.dist-info/METADATA")).read_text()
    assert "](https://github.com/hf-memkit/hf-memkit/blob/main/docs/index.md)" in page
    assert not re.search(r"\]\((?!https:|#)", page), "a link of README.md that leads nowhere on PyPI"
    code = (
        "from hf_memkit.common import resources as r; "
        "print(r.names('recipes'), r.names('ds_configs'), r.folder('recipes'))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=site, capture_output=True, text=True)
    assert "gpt2-on-16gb" in run.stdout and "zero2-offload" in run.stdout, run.stderr
    assert str(site) in run.stdout
    files = ("py.typed", "checks/deepspeed_0_19.json", "recipes/export/scripts/train_text.py")
    assert all((site / "hf_memkit" / file).exists() for file in files)
    assets = {path.name for path in (site / "hf_memkit" / "common" / "answer" / "assets").iterdir()}
    assert assets == {path.name for path in (ROOT / "hf_memkit" / "common" / "answer" / "assets").iterdir()}


def test_importing_the_package_and_help_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, hf_memkit, hf_memkit.measuring.memory.records; from hf_memkit.cli import main; main(['--help']);"
        "sys.exit(str(sorted({'torch', 'transformers', 'deepspeed', 'datasets'} & set(sys.modules))) )"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stderr.strip() == "[]"


def test_checking_arguments_and_showing_presets_imports_no_torch(tmp_path: Path) -> None:
    """Their sources are read instead: importing them takes seconds."""
    (tmp_path / "args.yaml").write_text("output_dir: x\nwarmup_ratio: 0.1\nmy_own: 1\noptim: adamw_torchh\n")
    code = (
        "import sys; from hf_memkit.cli import main\n"
        "codes = [main(each.split()) for each in ('check args.yaml', 'preset show lean', 'preset show lora', "
        "'preset copy 8bit -', 'ds copy zero2-lean -')]\n"
        "loaded = {'torch', 'transformers', 'trl', 'accelerate', 'deepspeed'} & sys.modules.keys()\n"
        "print('\\n', codes, sorted(loaded))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.splitlines()[-1].strip() == "[1, 0, 0, 0, 0] []", done.stderr[-2000:]


def test_every_public_name_exists() -> None:
    import hf_memkit

    assert hf_memkit.__all__ == sorted(hf_memkit.__all__)
    assert all(getattr(hf_memkit, name) is not None for name in hf_memkit.__all__)
    with pytest.raises(AttributeError):
        hf_memkit.no_such_name  # noqa: B018


def test_a_setup_is_immutable_and_every_setting_has_a_reason() -> None:
    setup = Setup("resident").put("arguments.optim", "sgd", "for a test")
    other = setup.put("arguments.optim", "adamw_torch", "another").put("model.dtype", "bfloat16", "small")
    assert setup.arguments == {"optim": "sgd"} and other.arguments == {"optim": "adamw_torch"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        setup.preset = "offload"  # type: ignore[misc]
    with pytest.raises(ValueError, match="no reason"):
        setup.put("arguments.seed", 1, "")
    with pytest.raises(ValueError, match=r"SECTION\.NAME"):
        setup.put("argument.seed", 1, "a typing mistake in the section")
    with pytest.raises(TypeError):
        setup.put("arguments.seed", object(), "not plain data")


def test_nested_values_cannot_be_changed_from_outside() -> None:
    config = {"zero_optimization": {"stage": 2}}
    setup = Setup("offload").put("deepspeed.config", config, "for a test")
    config["zero_optimization"]["stage"] = 3
    setup["deepspeed.config"]["zero_optimization"]["stage"] = 3
    setup.section("deepspeed")["config"]["zero_optimization"]["stage"] = 3
    assert setup["deepspeed.config"] == {"zero_optimization": {"stage": 2}}


def test_a_setup_survives_json() -> None:
    setup = Setup("lora", notes=("a note",)).put("adapter.r", 16, "the recipe's rank")
    assert Setup.from_json(json.loads(json.dumps(setup.to_json()))) == setup
    assert setup.drop("adapter").settings == ()
    assert Setting("adapter.r", 16, "the recipe's rank") in setup.settings


def test_a_ledger_adds_up_by_place() -> None:
    row = Row("device", "weights", "16-bit weights", 3 * GIB, "2 bytes a parameter")
    ledger = Ledger().with_rows([row, dataclasses.replace(row, place="host", size_bytes=GIB)])
    assert ledger.total_bytes("device") == 3 * GIB and ledger.total_bytes("device", "host") == 4 * GIB
    assert ledger.to_json()["device"] == [
        {"category": "weights", "term": "16-bit weights", "gib": 3.0, "phase": None, "source": "2 bytes a parameter"}
    ]


def test_what_different_phases_hold_is_not_added_up() -> None:
    always = Row("device", "weights", "weights", 3 * GIB, "a")
    backward = dataclasses.replace(always, size_bytes=2 * GIB, phase="backward")
    step = dataclasses.replace(always, size_bytes=GIB, phase="optimizer")
    ledger = Ledger((always, backward, backward, step))
    assert ledger.total_bytes("device") == 7 * GIB and ledger.peak_phase("device") == "backward"
    assert Ledger((always,)).peak_phase("device") is None


@pytest.mark.parametrize("name", list(KNOWN_GPUS))
def test_named_gpus_have_less_than_their_box_says(name: str) -> None:
    gpu = named_gpu(name)
    assert 0.85 * KNOWN_GPUS[name].box_gb * GIB < gpu.capacity_bytes < KNOWN_GPUS[name].box_gb * GIB
    assert gpu.usable_bytes < gpu.capacity_bytes
    assert gpu.bf16 == (KNOWN_GPUS[name].capability >= 8)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("rtx 4060 ti 16gb", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4060 Ti 16GB", "RTX 4060 Ti 16GB"),
        ("4090", "RTX 4090"),
        ("h100", "H100 80GB"),
        # As nvidia-smi names them.
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("a100-pcie-40gb", "A100 40GB PCIe"),
        ("NVIDIA H100 PCIe", "H100 80GB PCIe"),
        ("RTX 4090 PCIe", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
    ],
)
def test_gpus_are_known_by_any_spelling(spelling: str, name: str) -> None:
    assert named_gpu(spelling).name == name


@pytest.mark.parametrize(
    ("name", "proposed"),
    [
        ("RTX 409", ["RTX 4090"]),
        ("A100", ["A100 40GB", "A100 80GB"]),
        ("v100", ["V100 16GB", "V100 32GB"]),
        ("RTX 4060 Ti", ["RTX 4060 Ti 16GB"]),
        ("GTX 1080", []),
        ("GTX 1080 Ti", []),
        ("3090 Tie", ["RTX 3090", "RTX 3090 Ti"]),
    ],
)
def test_an_unknown_gpu_gets_the_nearest_names_and_a_way_out(name: str, proposed: list[str]) -> None:
    with pytest.raises(InputError, match="its memory instead, such as 16GB") as error:
        named_gpu(name)
    assert [card for card in KNOWN_GPUS if repr(card) in str(error.value)] == proposed


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("8xA100 80GB", '--gpu "A100 80GB" --gpus 8'),
        ("A100x4", '--gpu "A100" --gpus 4'),
        ("2 x RTX 4090", '--gpu "RTX 4090" --gpus 2'),
        ("RTX", '--gpu "RTX 4090"'),
        ("MI300X", "AMD"),
        ("M3 Max", "Apple"),
        ("TPU v4", "Google"),
        ("Gaudi2", "Intel"),
    ],
)
def test_another_kind_of_name_gets_its_own_answer(name: str, answer: str) -> None:
    """Would notice: an accelerator of another maker that is to be described by its memory, as if it were NVIDIA's."""
    with pytest.raises(InputError, match=re.escape(answer)) as error:
        named_gpu(name)
    assert "its memory" not in str(error.value)


def test_a_number_for_a_gpu_is_its_size() -> None:
    with pytest.raises(InputError, match=r"^unknown GPU '16'; did you mean 16GB\?$"):
        named_gpu("16")


@pytest.mark.parametrize(
    ("gpu", "memory", "ram", "of_option", "of_argument"),
    [
        ("T44", None, None, "--gpu: unknown GPU 'T44'", "gpu: unknown GPU 'T44'"),
        ("0.1GB", None, None, "--gpu: '0.1GB'", "gpu: '0.1GB'"),
        ("T4", "16XB", None, "--gpu-memory: '16XB'", "gpu_memory: '16XB'"),
        ("T4", None, "32", "--ram: '32'", "ram: '32'"),
    ],
)
def test_a_wrong_machine_names_the_option_or_the_argument(
    gpu: str, memory: str | None, ram: str | None, of_option: str, of_argument: str
) -> None:
    """Would notice: a message that leaves open which of several options, or which argument, is wrong."""
    for said, named in ((of_option, {}), (of_argument, {"option": "gpu"})):
        with pytest.raises(InputError, match=f"^{re.escape(said)}"):
            described_machine(gpu, memory, ram, None, **named)


@pytest.mark.parametrize(("variables", "why"), [
    ({}, "the hub did not answer"), ({"HF_HUB_OFFLINE": "1"}, "the hub is switched off (HF_HUB_OFFLINE=1)")
])  # fmt: skip
def test_a_hub_that_was_switched_off_did_not_fail_to_answer(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], why: str
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert why_no_hub() == why


def test_fields_read_from_the_source_of_transformers_are_those_of_its_class() -> None:
    """Names in their order, and of each type the values that it takes; a type of another library is any."""
    written = library_versions._written_types()
    assert list(written) == list(library_versions._imported_types())
    for name, kind in written.items():
        other = ["parallelism_config"]  # a class of accelerate's
        assert name in other or _told(kind) == _told(library_versions._imported_types()[name]), name


def _told(kind: object) -> object:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [each.value for each in kind]
    arms = typing.get_args(kind)
    return (typing.get_origin(kind), *map(_told, arms)) if arms else kind


def test_this_machine_is_described() -> None:
    machine = this_machine("/no/such/folder")
    assert machine.disk_path == "/" and machine.ram_bytes > GIB and machine.cpu_count >= 1


def test_an_upward_import_breaks_the_layers(tmp_path: Path) -> None:
    """The contract of the layers can fail: one upward import in a copy of the package, and lint-imports says so."""
    shutil.copytree(ROOT / "hf_memkit", tmp_path / "hf_memkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]

    def lint() -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert lint().returncode == 0, lint().stdout
    units = tmp_path / "hf_memkit" / "common" / "units.py"
    units.write_text(units.read_text() + "\nimport hf_memkit.presets\n")
    broken = lint()
    assert broken.returncode != 0 and "hf_memkit.common.units -> hf_memkit.presets" in broken.stdout


def test_a_size_beside_a_name_is_at_most_that_gpu_s() -> None:
    gpu = named_gpu("T4")
    assert described_gpu("T4", "16GB") == gpu
    smaller = described_gpu("T4", "8GB")
    assert smaller is not None and smaller.capacity_bytes < gpu.capacity_bytes and smaller.name == "T4"
    with pytest.raises(InputError, match="--gpu-memory 24GB"):
        described_gpu("T4", "24GB")
