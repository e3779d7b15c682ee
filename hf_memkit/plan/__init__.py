"""Finds the fastest settings of a script that fit the GPU, with the same sequences per optimizer step.

```
script, GPU ──> traces.py: the script stops where it makes its Trainer; each candidate is a fork of that process
                   │
choices.py ──> search.py ──> judgement.py: memory, time, does it fit ──> plan.py: ranked, written, shown (cli/plan.py)
```

With `--verify`, `verify.py` runs the best candidate for a few steps on this machine's GPU.
"""
