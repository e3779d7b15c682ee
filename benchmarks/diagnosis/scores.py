"""How often a diagnosis is right. In: runs with a known truth, and a detector. Out: rates by kind.

```
python -m benchmarks.diagnosis.scores tune  # the half to choose thresholds with; names what was missed
python -m benchmarks.diagnosis.scores all   # both halves and the real runs: benchmarks/results/diagnosis.json
```

Detection: of the states that must be said, how many were. False alarms: of the runs, how many were told a kind that
they do not show; of the healthy ones, how many were told anything. First step: of the states that were found and began
within a fifth of the run (`State.first` to `State.by`), how many were dated right to a tenth of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.diagnosis.generated_runs import GeneratedRun, State, runs

KINDS: Final = ("leak", "longer batches", "fragmentation", "another process")

_EVIDENCE: Final = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "diagnosis.json"
_DATED_WITHIN: Final = 0.1
_BEGINS_WITHIN: Final = 0.2


class _Finding(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def first_step(self) -> int: ...


Detector = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], Sequence[_Finding]]


@dataclass
class Scores:
    """Counts; the rates are properties, in shares of 1."""

    runs: int = 0
    healthy: int = 0
    healthy_alarmed: int = 0
    alarmed: int = 0
    """Runs that were told a kind that they do not show; the healthy ones too."""
    states: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    false: Counter[str] = field(default_factory=Counter)
    """False alarms by kind."""
    dated: int = 0
    dated_right: int = 0
    errors: list[float] = field(default_factory=list)
    """Of the dated: how far off, in shares of the run."""
    wrong: list[str] = field(default_factory=list)
    """What was missed, falsely said or dated wrongly, in words."""

    @property
    def detection(self) -> float:
        return sum(self.found.values()) / max(sum(self.states.values()), 1)

    @property
    def healthy_false_alarms(self) -> float:
        return self.healthy_alarmed / max(self.healthy, 1)

    @property
    def false_alarms(self) -> float:
        return self.alarmed / max(self.runs, 1)

    @property
    def first_step(self) -> float:
        return self.dated_right / max(self.dated, 1)

    def detection_of(self, kind: str) -> float:
        return self.found[kind] / max(self.states[kind], 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "healthy_runs": self.healthy,
            "states": sum(self.states.values()),
            "detection_rate": round(self.detection, 4),
            "false_alarm_rate": round(self.false_alarms, 4),
            "false_alarm_rate_on_healthy_runs": round(self.healthy_false_alarms, 4),
            "first_step_within_a_tenth_of_the_run": round(self.first_step, 4),
            "first_steps_compared": self.dated,
            "kinds": {
                kind: {
                    "states": self.states[kind],
                    "detection_rate": round(self.detection_of(kind), 4) if self.states[kind] else None,
                    "false_alarms": self.false[kind],
                }
                for kind in KINDS
            },
        }

    def text(self) -> str:
        """A table of a few lines."""
        lines = [f"{self.runs} runs, {self.healthy} of them healthy", "kind              states  found  false alarms"]
        lines += [f"{k:<16}  {self.states[k]:>6}  {self.found[k]:>5}  {self.false[k]:>12}" for k in KINDS]
        lines += [
            f"detection {self.detection:.1%}, false alarms {self.false_alarms:.1%} of all runs and "
            f"{self.healthy_false_alarms:.1%} of the healthy, first step right {self.dated_right} of {self.dated}"
        ]
        return "\n".join(lines)


def score(cases: Iterable[GeneratedRun], detector: Detector) -> Scores:
    """Runs the detector over all cases."""
    scores = Scores()
    for case in cases:
        _score_one(scores, case, detector(case.steps, case.run))
    return scores


def _score_one(scores: Scores, case: GeneratedRun, findings: Sequence[_Finding]) -> None:
    said = {finding.kind: finding for finding in findings}
    true = {state.kind: state for state in case.states}
    scores.runs += 1
    scores.healthy += not true
    false = said.keys() - true.keys()
    scores.alarmed += bool(false)
    scores.healthy_alarmed += bool(false) and not true
    scores.false.update(false)
    scores.wrong += [f"{case.name}: false {kind}, from step {said[kind].first_step}" for kind in sorted(false)]
    length = len(case.steps)
    for kind, state in true.items():
        scores.states[kind] += 1
        if kind not in said:
            scores.wrong.append(f"{case.name}: missed {_words(state)}")
            continue
        scores.found[kind] += 1
        if state.by - state.first > _BEGINS_WITHIN * length:
            continue
        step = said[kind].first_step
        error = max(state.first - step, step - state.by, 0) / length
        scores.dated += 1
        scores.errors.append(error)
        scores.dated_right += error <= _DATED_WITHIN
        if error > _DATED_WITHIN:
            scores.wrong.append(f"{case.name}: {_words(state)} was dated step {step} of {length}")


def _words(state: State) -> str:
    return f"{state.kind} that began in step {state.first} to {state.by}"


def _main() -> None:
    from hf_memkit.report.diagnosis import diagnose

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("tune", "all"))
    if parser.parse_args().which == "tune":
        scores = score(runs("tune"), diagnose)
        print(scores.text(), *scores.wrong, sep="\n")
        return
    from benchmarks.diagnosis.real_runs import real_runs

    with tempfile.TemporaryDirectory() as folder:
        all_scores = {
            "tune": score(runs("tune"), diagnose),
            "held-out": score(runs("held-out"), diagnose),
            "real": score(real_runs(Path(folder)), diagnose),
        }
    for name, scores in all_scores.items():
        print(f"--- {name} ---", scores.text(), sep="\n")
    evidence = {
        "command": "python -m benchmarks.diagnosis.scores all",
        "what": {
            "tune": "generated runs with which thresholds were chosen",
            "held-out": "generated runs that were scored once thresholds were fixed",
            "real": "real trainings on the CPU, whose tensors were counted",
        },
        **{name: scores.to_json() for name, scores in all_scores.items()},
    }
    _EVIDENCE.parent.mkdir(parents=True, exist_ok=True)
    _EVIDENCE.write_text(json.dumps(evidence, indent=2) + "\n")


if __name__ == "__main__":
    _main()
