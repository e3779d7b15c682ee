"""`memkit run`: a user's script with a memory report, and a recipe's folder with all that its run needs."""
