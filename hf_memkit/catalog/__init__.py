"""Facts about GPUs, hosts, models, optimizers and libraries. A new GPU, architecture or optimizer is a row here."""
