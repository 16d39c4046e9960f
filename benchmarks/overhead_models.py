"""The two models of the overhead benchmark as plain functions, shared by the job and the DDP loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORKERS = 2
PERCEPTRON_BATCH = 256
TRANSFORMER_BATCH = 16
VOCABULARY, CONTEXT, WIDTH, LAYERS = 512, 64, 128, 4


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def perceptron_data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 784, generator=generator)
    return inputs, torch.randint(0, 10, (samples,), generator=generator)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        mask = torch.triu(torch.full((CONTEXT, CONTEXT), float("-inf")), diagonal=1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.tokens(tokens) + self.places(places), mask=self.mask)
        return self.head(hidden)


def transformer_data(samples: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(
        0, VOCABULARY, (samples, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
