"""Reading records: how a run ended, diagnosis over steps, text, one HTML page."""
