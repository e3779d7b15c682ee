"""What a verb answers, and how it is shown: `answer.py` has the value, `terminal.py` and `page.py` print it."""
