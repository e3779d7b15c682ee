"""What everything stands on: errors, sizes, the words of ledgers and records, files and imports."""
