"""The whole training step in one decorator: heterps owns forward, backward and update.

    python examples/decorator.py

The tables below have dense gradients and Adam, the usual and slow way; inside ``train_step`` their rows are brought up
to date when they are next read, which gives the same numbers at the cost of the rows that a batch touches.
"""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import heterps_compile
from heterps_compile.data import Recipe, generate
from heterps_compile.metrics import auc
from heterps_compile.models import DeepFM

clicks = generate(Recipe(num_samples=100_000, test_samples=20_000, rows=(20_000,) * 26, active_rows=500))
torch.manual_seed(0)
model = DeepFM(clicks.train.rows, dim=16)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)


@heterps_compile.train_step(optimizer=optimizer)
def step(model, batch):
    return binary_cross_entropy_with_logits(model(batch.dense, batch.ids), batch.labels)


for number, batch in enumerate(clicks.train.batches(2048), start=1):
    loss = step(model, batch)
    if number % 10 == 0:
        print(f"step {number:3}   loss {loss.item():.4f}")

model.eval()  # tables are brought up to date here
with torch.no_grad():
    logits = model(clicks.test.dense, clicks.test.ids)
print(f"held-out AUC {auc(clicks.test.labels, logits):.4f}; the planted signal allows {clicks.planted_auc:.4f}")
