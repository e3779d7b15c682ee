"""What is special about a class of Trainer, a file a kind."""
