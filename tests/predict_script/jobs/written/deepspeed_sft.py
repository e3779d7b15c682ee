# deepspeed deepspeed_sft.py --deepspeed ds_zero2.json ...   (Alpaca style instruction tuning)
import copy
import json
import logging
from dataclasses import dataclass, field
from typing import Dict, Optional, Sequence

import torch
import transformers
from torch.utils.data import Dataset
from transformers import Trainer

IGNORE_INDEX = -100
DEFAULT_PAD_TOKEN = "[PAD]"
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


@dataclass
class ModelArguments:
    model_name_or_path: Optional[str] = field(default="facebook/opt-125m")


@dataclass
class DataArguments:
    data_path: str = field(default=None, metadata={"help": "Path to the training data."})


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    cache_dir: Optional[str] = field(default=None)
    optim: str = field(default="adamw_torch")
    model_max_length: int = field(default=512, metadata={"help": "Maximum sequence length."})


def smart_tokenizer_and_embedding_resize(special_tokens_dict: Dict, tokenizer, model):
    """Resize tokenizer and embedding; new rows get the mean of the old ones."""
    num_new_tokens = tokenizer.add_special_tokens(special_tokens_dict)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if num_new_tokens > 0:
        emb = model.get_input_embeddings().weight.data
        if emb.shape[0] == len(tokenizer):  # not when ZeRO-3 has partitioned it
            emb[-num_new_tokens:] = emb[:-num_new_tokens].mean(dim=0, keepdim=True)
    model.config.pad_token_id = tokenizer.pad_token_id


class SupervisedDataset(Dataset):
    def __init__(self, data_path: str, tokenizer):
        super().__init__()
        logging.warning("Loading data...")
        with open(data_path) as f:
            list_data_dict = json.load(f)
        sources = [PROMPT.format_map(e) for e in list_data_dict]
        targets = [f"{e['output']}{tokenizer.eos_token}" for e in list_data_dict]
        logging.warning("Tokenizing inputs... This may take some time...")
        self.input_ids, self.labels = [], []
        for s, t in zip(sources, targets):
            ids = tokenizer(s + t, return_tensors="pt", max_length=tokenizer.model_max_length, truncation=True).input_ids[0]
            source_len = tokenizer(s, return_tensors="pt", max_length=tokenizer.model_max_length, truncation=True).input_ids.ne(tokenizer.pad_token_id).sum().item()
            label = copy.deepcopy(ids)
            label[:source_len] = IGNORE_INDEX
            self.input_ids.append(ids)
            self.labels.append(label)

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, i) -> Dict[str, torch.Tensor]:
        return dict(input_ids=self.input_ids[i], labels=self.labels[i])


@dataclass
class DataCollatorForSupervisedDataset:
    tokenizer: transformers.PreTrainedTokenizerBase

    def __call__(self, instances: Sequence[Dict]) -> Dict[str, torch.Tensor]:
        input_ids, labels = tuple([instance[key] for instance in instances] for key in ("input_ids", "labels"))
        input_ids = torch.nn.utils.rnn.pad_sequence(input_ids, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
        return dict(input_ids=input_ids, labels=labels, attention_mask=input_ids.ne(self.tokenizer.pad_token_id))


def train():
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, cache_dir=training_args.cache_dir)
    model.config.use_cache = False
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        cache_dir=training_args.cache_dir,
        model_max_length=training_args.model_max_length,
        padding_side="right",
    )
    if tokenizer.pad_token is None:
        smart_tokenizer_and_embedding_resize(dict(pad_token=DEFAULT_PAD_TOKEN), tokenizer, model)
    data_module = dict(
        train_dataset=SupervisedDataset(data_args.data_path, tokenizer),
        eval_dataset=None,
        data_collator=DataCollatorForSupervisedDataset(tokenizer=tokenizer),
    )
    trainer = Trainer(model=model, processing_class=tokenizer, args=training_args, **data_module)
    trainer.train()
    trainer.save_state()
    trainer.save_model(output_dir=training_args.output_dir)


if __name__ == "__main__":
    train()
