"""Reading records: how a run ended, diagnosis over steps, text, one HTML page. Needs no torch: records are read on any
machine."""
