"""Traces of a waiting script, each made once; a plan also reuses those that earlier plans kept."""

from __future__ import annotations

import json
import threading
from concurrent.futures import CancelledError, Future

from hf_memkit.plan.kept_traces import KeptTraces
from hf_memkit.prediction.waiting_script import TraceFile, WaitingScript
from hf_memkit.setup.script_overrides import Overrides


class ScriptTraces:
    """Traces of one script on one kind of GPU.

    Args:
        script: waits at its Trainer.
        keeps: whether to use the cache of traces (`kept_traces.py`).
    """

    def __init__(self, script: WaitingScript, *, keeps: bool = False) -> None:
        self.script = script
        self._keeps = keeps
        self._kept: KeptTraces | None = None
        self._done: dict[str, Future[TraceFile]] = {}
        self._done_lock = threading.Lock()

    def of(self, overrides: Overrides) -> TraceFile:
        """The trace of the script with these overrides. Raises CancelledError after the script's end."""
        key = json.dumps(overrides.to_json(), sort_keys=True)
        with self._done_lock:
            begins = key not in self._done
            done = self._done.setdefault(key, Future())
        if begins:
            try:
                done.set_result(self._cached_or_traced(overrides))
            except BaseException as error:
                done.set_exception(error)
        return done.result()

    def _cached_or_traced(self, overrides: Overrides) -> TraceFile:
        own = overrides == Overrides()
        if self._kept is not None and not own:
            result = self.script.new_result()
            if self._kept.find(overrides, result):
                return TraceFile(result)
        try:
            traced = self.script.trace(overrides)
        finally:
            if self.script.has_ended:
                raise CancelledError
        training = traced.outcome().training if self._keeps else None
        if training is not None and traced.path is not None:
            if own and training.facts.rows_digest:
                self._kept = KeptTraces(training, self.script.request())
            elif self._kept is not None:
                self._kept.keep(overrides, traced.path)
        return traced
