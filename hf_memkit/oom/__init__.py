"""An out-of-memory message or log: its numbers, size or fragmentation, and what to change. Standard library only."""

from __future__ import annotations

from hf_memkit.oom.change import Change
from hf_memkit.oom.explanation import Explanation, explain_killed, explain_oom, explain_records
from hf_memkit.oom.message import OomMessage
from hf_memkit.oom.messages import FoundMessage, find_messages, parse_message
from hf_memkit.oom.suggestions import suggest
from hf_memkit.oom.verdict import Verdict, for_job, judge

__all__ = [
    "Change",
    "Explanation",
    "FoundMessage",
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
