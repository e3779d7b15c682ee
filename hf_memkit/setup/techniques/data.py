"""Data sets and batches in RAM: only advice."""

from __future__ import annotations

from hf_memkit.setup.techniques.registry import advice

advice(
    "fewer-workers", "data", {"arguments.dataloader_num_workers": "fewer"},
    saves="each worker process holds a copy of the data that it loads, and prefetched batches",
    costs="loading may become too slow for the GPU: watch the step time",
    offered={"host/data loader": 1, "host/evaluate": 4, "host/offload": 2, "host/anything": 1},
)  # fmt: skip
advice(
    "no-workers", "data", {"arguments.dataloader_num_workers": 0},
    saves="the training process makes the batches and needs no /dev/shm",
    costs="the GPU waits for each batch",
    slows=True, offered={"shared memory/anything": 1},
)  # fmt: skip
advice(
    "pageable-batches", "data", {"arguments.dataloader_pin_memory": False},
    saves="batches use pageable RAM instead of page-locked RAM",
    costs="copies to the GPU are slower, and training waits for them",
    slows=True, offered={"pinned/DeepSpeed": 3, "pinned/unsloth": 3, "pinned/anything": 1},
)  # fmt: skip
advice(
    "fewer-map-processes", "data", {"data.num_proc": "fewer"},
    saves="dataset.map copies the training process num_proc times, and each copy holds its rows (scripts call the "
    "option preprocessing_num_workers or dataset_num_proc)",
    costs="slower preprocessing, but only once: datasets caches the result",
    offered={"host/data": 1},
)  # fmt: skip
advice(
    "smaller-map-batches", "data", {"data.writer_batch_size": 100},
    saves="dataset.map keeps this many finished rows in RAM before it writes them (default 1000), and with "
    "batched=True another batch_size rows",
    costs="more and smaller writes to the disk",
    offered={"host/data": 2},
)  # fmt: skip
advice(
    "streamed-data", "data", {"data.streaming": True},
    saves="load_dataset(…, streaming=True) reads and tokenizes rows when they are needed, and keeps no table",
    costs="the data set has no length, so that you must set max_steps; rows are shuffled only within a buffer",
    group="another method", offered={"host/data": 3}, unless=("streaming",),
)  # fmt: skip
