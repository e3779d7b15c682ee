"""An out-of-memory message or log: its numbers, size or fragmentation, and what to change. Standard library only."""

from __future__ import annotations

from hf_memkit.measuring.out_of_memory.advice import suggest
from hf_memkit.measuring.out_of_memory.cause import Verdict, for_job, judge
from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.explanation import Explanation, explain_killed, explain_oom, explain_records
from hf_memkit.measuring.out_of_memory.message import OomMessage
from hf_memkit.measuring.out_of_memory.messages import find_messages, parse_message

__all__ = [
    "Change",
    "Explanation",
    "OomMessage",
    "Verdict",
    "explain_killed",
    "explain_oom",
    "explain_records",
    "find_messages",
    "for_job",
    "judge",
    "parse_message",
    "suggest",
]
