"""Base modules: errors, sizes, names of phases and categories, user files and imports."""
