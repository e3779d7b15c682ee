"""Data sets and batches in RAM: only advice."""

from __future__ import annotations

from hf_memkit.setup.techniques.registry import advice

advice(
    "fewer-workers", "data", {"arguments.dataloader_num_workers": "fewer"},
    "each worker process holds its own copy of the data it loads, and prefetched batches",
    "loading may become too slow for the GPU; watch the step time",
    offered={"host/data loader": 1, "host/evaluate": 4, "host/offload": 2, "host/anything": 1},
)  # fmt: skip
advice(
    "no-workers", "data", {"arguments.dataloader_num_workers": 0},
    "batches are then made in the training process, without /dev/shm",
    "the GPU waits for each batch",
    slows=True, offered={"shared memory/anything": 1},
)  # fmt: skip
advice(
    "pageable-batches", "data", {"arguments.dataloader_pin_memory": False},
    "batches then lie in pageable RAM", "copies to the GPU are slower and block",
    slows=True, offered={"pinned/DeepSpeed": 3, "pinned/unsloth": 3, "pinned/anything": 1},
)  # fmt: skip
advice(
    "fewer-map-processes", "data", {"data.num_proc": "fewer"},
    "each process of datasets' map is a copy of this one with its own rows (scripts call num_proc "
    "preprocessing_num_workers or dataset_num_proc)",
    "slower preprocessing, once: the result is cached",
    offered={"host/data": 1},
)  # fmt: skip
advice(
    "smaller-map-batches", "data", {"data.writer_batch_size": 100},
    "dataset.map keeps this many finished rows in RAM before it writes them (datasets: 1000 by default); with "
    "batched=True also batch_size rows",
    "more, smaller writes",
    offered={"host/data": 2},
)  # fmt: skip
advice(
    "streamed-data", "data", {"data.streaming": True},
    "load_dataset(…, streaming=True) reads and tokenizes rows as they are needed and keeps no table",
    "no length of the data set: set max_steps; no shuffling beyond a buffer",
    group="another method", offered={"host/data": 3}, unless=("streaming",),
)  # fmt: skip
