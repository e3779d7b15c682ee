"""`memkit run`: a user's script with a memory report, or a recipe's folder with everything that its run needs."""
