"""The callback for a user's script: turns Trainer's events into records, dashboard numbers, OOM notes, a summary."""
