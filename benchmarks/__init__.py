"""What is measured on a GPU, and the evidence of it."""
