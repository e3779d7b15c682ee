# The cell of a notebook: run again and again, in one namespace, with whatever the last run left behind.
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32))
dataset = [
    {"input_ids": [(i * k) % 64 for k in range(24)], "labels": [(i * k) % 64 for k in range(24)]} for i in range(32)
]
trainer = Trainer(
    model,
    TrainingArguments(
        "out", max_steps=4, per_device_train_batch_size=4, logging_steps=1, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no",
    ),
    train_dataset=dataset,
)  # fmt: skip
trainer.train()
trainer.save_model("out")
trainer.state.save_to_json("out/trainer_state.json")
