"""Facts about GPUs, hosts, models, optimizers, and libraries with their arguments. A new GPU, architecture or
optimizer is a row here."""
