"""Finds the fastest settings of a script that fit the GPU, with the same sequences per optimizer step.

```
script, GPU ──> traces.py: the script stops where it makes its Trainer; each candidate is a fork of that process
                   │
choices.py ──> search.py ──> judgement.py: memory, time, does it fit ──> plan.py: ranked, written, shown (cli/plan.py)
```

With `--verify`, `verify.py` runs the best candidate for a few steps on this machine's GPU.

Words:
    choice: one change to the script's settings, in a slot such as "checkpointing".
    combination: choices, at most one of each slot.
    candidate: a combination with a micro-batch and an accumulation. Texts for users call it a setup.
    judgement: a candidate with its predicted memory and time, and whether it fits.
    plan: all judgements for one GPU, ranked.
"""
