"""Metrics that decide something, and whether lower or higher values of them are better. Pure.

    metric    = "min " NAME | "max " NAME | NAME

A bare NAME needs a well-known direction. Its last word decides, ignoring words without a direction
(`val_loss`, `top1_accuracy`, `f1_score`, `recall@5`, `bits_per_byte`): one of LOWER or HIGHER. A name is
refused, with both spellings, if it shows no direction, contradicts itself (`accuracy_loss`) or negates
(`neg_mean_squared_error`): a wrong guess would keep the worst model as the best.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.errors import JobError

MIN, MAX = "min", "max"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER = _words("""
    loss error err mae mse rmse mape smape rmsle msle nll bce ce crossentropy xent perplexity ppl
    bits bpb bpc bpd wer cer ter eer fid brier
""")
"""Words of metrics that are better when they are lower."""
HIGHER = _words("""
    accuracy acc auc auroc auprc ap map precision recall f1 f2 fbeta specificity sensitivity dice iou miou
    jaccard kappa mcc r2 likelihood loglikelihood ndcg mrr hit hits bleu rouge meteor chrf psnr ssim
""")
"""Words of metrics that are better when they are higher."""
NEUTRAL = _words("""
    val valid validation eval test dev train mean avg average total overall macro micro weighted score rate
    at per k byte bytes char character token word dim pixel sample percent pct
""")
"""Words without a direction."""
NEGATING = _words("neg negative minus inverse inverted inv non not one")

_TOP = re.compile(r"top\d*")
"""`top5` is an accuracy, unless another word names the metric."""


@dataclass(frozen=True)
class Monitor:
    """A metric and its direction."""

    name: str
    lower: bool
    """If true, lower values are better."""

    def __str__(self) -> str:
        return f"{MIN if self.lower else MAX} {self.name}"

    def better(self, value: float, best: float) -> bool:
        return value < best if self.lower else value > best


LOSS = Monitor("loss", lower=True)


def metric_name(text: str) -> str:
    """Return the metric's name, without the direction."""
    return _split(text)[1]


def read_monitor(text: str, *, option: str, saved: Monitor | None = None) -> Monitor:
    """Return the metric that `text` names: with the direction that it states, else with the one that a
    resumed run began with, else with that of its name. `option` shows how to write it, with {} for the
    metric."""
    mode, name = _split(text)
    if mode:
        return Monitor(name, mode == MIN)
    if saved is not None and saved.name == name:
        return saved
    lower = lower_is_better(name)
    if lower is None:
        low, high = (option.format(f"{mode} {name}") for mode in (MIN, MAX))
        raise JobError(
            f"{option.format(name)}: the name does not show whether lower or higher is better. "
            f"Write  {low}  if lower is better,  {high}  if higher is."
        )
    return Monitor(name, lower)


def lower_is_better(name: str) -> bool | None:
    """Return whether lower values of a metric with this name are better; None if the name does not say."""
    words = re.findall(r"[a-z]+\d*|\d+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower())
    if NEGATING.intersection(words) or re.match(r"\s*(-|1\s*-)", name):
        return None
    whole = "".join(words)
    if whole in LOWER or whole in HIGHER:  # mAP, cross_entropy
        return whole in LOWER
    telling = [w for w in words if w not in NEUTRAL and not w.isdigit() and not _TOP.fullmatch(w)]
    if not telling:
        return False if any(re.fullmatch(r"top\d+", word) for word in words) else None
    if telling[-2:] == ["cross", "entropy"]:
        telling[-2:] = ["crossentropy"]
    said = {word in LOWER for word in telling if word in LOWER or word in HIGHER}
    return said.pop() if len(said) == 1 and telling[-1] in LOWER | HIGHER else None


def saved_monitor(plan: Mapping[str, Any] | None, name: str) -> Monitor | None:
    """Return the direction of this metric by which a saved plan has chosen its best model."""
    plan = plan or {}
    if "monitor" in plan:
        mode, before = _split(plan["monitor"])
        return Monitor(before, mode == MIN) if before == name else None
    best = plan.get("best", {}).get("metrics") or {}
    return Monitor(name, formerly_lower(name)) if name in best else None


def formerly_lower(name: str) -> bool:
    """Return the direction in runs of versions that did not save it."""
    return any(word in name.lower() for word in ("loss", "error", "perplexity"))


def _split(text: str) -> tuple[str, str]:
    """(min, max or nothing, name)"""
    mode, _, name = text.strip().partition(" ")
    return (mode, name.strip()) if mode in (MIN, MAX) and name.strip() else ("", text.strip())
