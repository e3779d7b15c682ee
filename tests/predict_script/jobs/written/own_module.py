"""A plain PyTorch model and data set with the Hugging Face Trainer around."""
import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, random_split
from transformers import Trainer, TrainingArguments


class WindowDataset(Dataset):
    """Character windows of a text file: x is the window, y the next character."""

    def __init__(self, path, window=24):
        text = Path(path).read_text()
        self.chars = sorted(set(text))
        index = {c: i for i, c in enumerate(self.chars)}
        self.data = torch.tensor([index[c] for c in text], dtype=torch.long)
        self.window = window

    def __len__(self):
        return len(self.data) - self.window

    def __getitem__(self, i):
        return {"x": self.data[i : i + self.window], "y": self.data[i + self.window]}


class CharGRU(nn.Module):
    def __init__(self, vocab, dim=32, hidden=48, layers=2, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, hidden, layers, batch_first=True, dropout=dropout)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab)
        self.register_buffer("scale", torch.tensor(1.0))
        self.apply(self._init)

    def _init(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)

    def forward(self, x, y=None):
        h, _ = self.rnn(self.embed(x))
        logits = self.head(self.norm(h[:, -1])) * self.scale
        if y is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


class MyTrainer(Trainer):
    def create_optimizer(self, model=None):
        if self.optimizer is None:
            decay = [p for p in self.model.parameters() if p.requires_grad and p.dim() > 1]
            other = [p for p in self.model.parameters() if p.requires_grad and p.dim() <= 1]
            self.optimizer = torch.optim.SGD(
                [{"params": decay, "weight_decay": 0.01}, {"params": other, "weight_decay": 0.0}],
                lr=self.args.learning_rate, momentum=0.9, nesterov=True,
            )
        return self.optimizer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("text")
    ap.add_argument("--out", default="char-rnn")
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--own-optimizers", action="store_true", help="give (optimizer, scheduler) to the Trainer")
    ap.add_argument("--lr", type=float, default=0.05)
    a = ap.parse_args()

    torch.manual_seed(1)
    full = WindowDataset(a.text)
    n_val = min(len(full) // 10, 64)
    train_set, val_set = random_split(full, [len(full) - n_val, n_val], generator=torch.Generator().manual_seed(42))
    print(f"{len(full)} windows, {len(full.chars)} characters; train {len(train_set)}, validation {len(val_set)}")
    print("mean of the data:", full.data.float().mean().item(), "std:", full.data.float().std().item())

    model = CharGRU(len(full.chars))
    print(f"parameters: {sum(p.numel() for p in model.parameters())}")
    for name, p in model.named_parameters():
        print(f"  {name:20s} {tuple(p.shape)} mean {p.mean().item():+.4f} std {p.std().item():.4f}")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")

    args = TrainingArguments(
        output_dir=a.out, per_device_train_batch_size=a.batch, max_steps=a.steps, learning_rate=a.lr,
        gradient_accumulation_steps=2, logging_steps=1, save_strategy="no", report_to="none",
        label_names=["y"], remove_unused_columns=False, max_grad_norm=0.5,
    )
    if a.own_optimizers:
        optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr / 10, betas=(0.9, 0.98))
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / max(a.steps, 1)))
        )
        trainer = Trainer(model=model, args=args, train_dataset=train_set, eval_dataset=val_set, optimizers=(optimizer, scheduler))
    else:
        trainer = MyTrainer(model=model, args=args, train_dataset=train_set, eval_dataset=val_set)
    trainer.train()
    print("validation:", trainer.evaluate()["eval_loss"])

    torch.save({"state_dict": model.state_dict(), "chars": full.chars}, Path(a.out) / "model.pt")
    again = torch.load(Path(a.out) / "model.pt", map_location="cpu", weights_only=True)
    fresh = CharGRU(len(again["chars"]))
    print(fresh.load_state_dict(again["state_dict"]))


if __name__ == "__main__":
    main()
