"""What memkit knows of things that others make: GPUs, hosts, models, optimizers, libraries and their arguments.

A new GPU, architecture or optimizer is a row here.
"""
