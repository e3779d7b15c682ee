"""Find known mistakes before any model is loaded: in a DeepSpeed JSON, Trainer's arguments, or a setup.

```python
problems = check(setup)
problems = check(Subject(config=json.load(open("ds.json")), arguments={"bf16": True}))
problems = check_file("ds.json", args_file="args.yaml")
```
"""

from hf_memkit.checks.apply import check, check_file, not_checked, read_subject
from hf_memkit.checks.rule import RULES, Problem, Rule, Severity
from hf_memkit.checks.subject import Subject

__all__ = ["RULES", "Problem", "Rule", "Severity", "Subject", "check", "check_file", "not_checked", "read_subject"]
