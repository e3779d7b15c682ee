"""What a training takes, measured: counters (`memory/`), the callback, its records, reports, out-of-memory errors."""
