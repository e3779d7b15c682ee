"""Trains a model of Llama-3.2-1B's size with Trainer: the script of the examples in README.md.

It needs no download: the weights are random and the tokens are made up. In a script of yours both come from
`from_pretrained` and a data set; memory and time are the same.
"""

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

LENGTH = 1024

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = AutoConfig.for_model(
    "llama",
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
rows = [[(row + token) % 50_000 for token in range(LENGTH)] for row in range(390)]
data = Dataset.from_dict({"input_ids": rows, "labels": rows})
model = AutoModelForCausalLM.from_config(config)
Trainer(model, arguments, train_dataset=data).train()
