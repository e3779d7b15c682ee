"""The callback for a user's script: records, dashboard numbers, OOM notes and a summary from Trainer's events."""
