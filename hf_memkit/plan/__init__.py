"""The fastest setup that fits: candidates of the same batch, each traced without a GPU, priced, ranked, and proved
where there is one.

```
script, GPU ──> traces.py: the script waits where it makes its Trainer, a fork of it for each candidate
                   │
choices.py ──> search.py ──> judgement.py: memory, time, does it fit ──> plan.py: ranked, written, shown (cli/plan.py)
```
"""
