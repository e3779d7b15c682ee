"""Reading records, without torch: how a run ended, diagnosis over steps, text, one HTML page."""
