"""Word vectors from a text: skip-gram or CBOW with negative sampling, on parameter servers.

    manyhands train examples/word2vec.py --strategy ps:async --workers 2 --set text=corpus.txt
    manyhands words runs/word2vec-... --similar king --save vectors.txt

All workers read and update the same two tables, one row per word, without waiting for each other: a
batch touches a few thousand rows of millions, so conflicts are rare. `--set cbow=true` trains CBOW.
`--set direct=false` trains skip-gram the slow way, with autograd over mh.SparseEmbedding, which works with
any strategy, also synchronous ones.
"""

from dataclasses import dataclass

import torch
from torch import nn

import manyhands as mh


@dataclass
class Word2Vec(mh.Job):
    """Skip-gram with 100 dimensions, as in the paper and as gensim's sg=1."""

    text: str = ""  # a file of words; .gz, .bz2 and .xz too
    dim: int = 100
    window: int = 5
    negative: int = 5
    sample: float = 1e-4  # words more frequent than this are subsampled
    min_count: int = 5
    cbow: bool = False
    direct: bool = True
    lr: float = 0.05
    batch_size: int = 32  # chunks of 1,000 words
    epochs: int = 5

    def data(self):
        if not self.text:
            raise mh.JobError("word2vec needs a text:  --set text=corpus.txt")
        return mh.data.corpus(self.text, min_count=self.min_count)

    def model(self):
        vocabulary = self.data().vocabulary
        if not self.direct:
            return SkipGram(vocabulary, self.dim, self.window, self.negative, self.sample)
        return mh.words.WordModel(
            vocabulary,
            dim=self.dim,
            window=self.window,
            negative=self.negative,
            sample=self.sample,
            cbow=self.cbow,
        )

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr)

    def schedule(self, optimizer, num_steps):
        """Decay the learning rate linearly to almost zero."""
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(1e-4, 1 - step / num_steps)
        )

    def collate(self, samples):
        """Join chunks into one text, with a sentence end (-1) between them."""
        end = torch.tensor([-1], dtype=torch.int32)
        return torch.cat([piece for sample in samples for piece in (sample, end)])

    def inputs(self, batch):
        return batch

    def loss(self, output, batch):
        return output  # SkipGram computes it; WordModel learns without one

    def unit(self):
        corpus = self.data()
        return "words", corpus.num_words / len(corpus)


class SkipGram(nn.Module):
    """The same model with autograd: tables behind embeddings, and a loss."""

    def __init__(self, vocabulary, dim, window, negative, sample):
        super().__init__()
        rows = len(vocabulary)
        self.inputs = mh.SparseEmbedding(rows, dim, optimizer="adagrad", lr=0.1)
        self.outputs = mh.SparseEmbedding(rows, dim, optimizer="adagrad", lr=0.1, init="zeros")
        self.window, self.negative = window, negative
        self.register_buffer("keep", torch.from_numpy(vocabulary.keep_probability(sample)), False)
        noise = torch.from_numpy(vocabulary.counts).double() ** 0.75
        self.register_buffer("noise", noise, False)

    def forward(self, tokens):
        words = tokens[tokens >= 0].long()
        words = words[torch.rand(len(words)) < self.keep[words]]
        reach = torch.randint(1, self.window + 1, (len(words),))
        pairs = [
            (words[hop:], words[:-hop], reach[hop:] >= hop)
            for hop in range(1, min(self.window, len(words) - 1) + 1)
        ]
        centre = torch.cat([a[near] for a, b, near in pairs] + [b[near] for a, b, near in pairs])
        around = torch.cat([b[near] for a, b, near in pairs] + [a[near] for a, b, near in pairs])
        if not len(centre):
            return self.inputs(words).sum() * 0.0
        drawn = torch.multinomial(self.noise, len(centre) * self.negative, replacement=True)
        targets = torch.cat([centre[:, None], drawn.view(-1, self.negative)], dim=1)
        scores = (self.outputs(targets) @ self.inputs(around)[:, :, None]).squeeze(2)
        labels = torch.zeros_like(scores)
        labels[:, 0] = 1.0
        return nn.functional.binary_cross_entropy_with_logits(scores, labels) * scores.shape[1]
