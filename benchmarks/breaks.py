"""Whether the tests notice what can go wrong: breaks the product in a copy, one patch after another, and runs the test
that is to fail.

    python benchmarks/breaks.py                    # all, about half an hour on one core; exits 1 if one is missed
    python benchmarks/breaks.py --only zero        # those whose patch or file has this in its name
    python benchmarks/breaks.py --record           # writes outcomes' times and the versions into the index

The patches lie in `benchmarks/results/breaks/`, with an index, `breaks.json`: what each breaks, in which file, and
`caught_by`, a test that passes without it. They were chosen by somebody who had read the product and not its tests;
`test_added` says that no quick test was found to notice, and that this one was written, or given an assertion that can
fail, for it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also runs from a checkout that is not installed

from benchmarks.provenance import RESULTS, provenance

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = RESULTS / "breaks"
INDEX: Final = FOLDER / "breaks.json"
OUTCOMES: Final = {0: "MISSED: the test passes", 1: "caught"}
"""By pytest's exit status; any other says that there is no such test any more."""


def outcome(copy: Path, entry: dict[str, Any]) -> str:
    """What becomes of one break in `copy`, left as it was; sets the entry's `seconds` if it is caught."""
    patch = str(FOLDER / entry["patch"])
    if subprocess.run(["git", "apply", "-C1", patch], cwd=copy, capture_output=True).returncode != 0:
        return "NOT APPLIED: the code has moved; make the patch anew"
    pytest = [sys.executable, "-m", "pytest", "--exhaustive", "-q", "-x", "-p", "no:cacheprovider"]
    command = [*pytest, entry["caught_by"]]
    started = time.monotonic()
    ran = subprocess.run(command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True)
    subprocess.run(["git", "apply", "-C1", "--reverse", patch], cwd=copy, check=True)
    found = OUTCOMES.get(ran.returncode, f"NOT RUN: pytest ended with {ran.returncode}")
    if found == "caught":
        entry["seconds"] = round(time.monotonic() - started, 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="breaks whose patch or file has this in its name")
    parser.add_argument("--record", action="store_true", help="write times and versions into the index")
    asked = parser.parse_args()
    index = json.loads(INDEX.read_text())
    chosen = [each for each in index["breaks"] if asked.only in each["patch"] or asked.only in each["file"]]
    if not chosen:
        parser.error(f"--only {asked.only}: no patch and no file of {INDEX} has that in its name")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        committed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(committed)) as archive:
            archive.extractall(folder, filter="data")
        for entry in chosen:
            found = outcome(Path(folder), entry)
            missed += found != "caught"
            print(f"{entry['patch']}: {found} ({entry['caught_by']})", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} are caught")
    if asked.record:
        INDEX.write_text(json.dumps({**index, **provenance()}, indent=2, ensure_ascii=False) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
