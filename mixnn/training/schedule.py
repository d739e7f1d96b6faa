"""The learning rate as a function of the step: stateless, so that resuming needs nothing."""

from __future__ import annotations

import math


def learning_rate(step: int, base: float, warmup_steps: int, total_steps: int) -> float:
    """Linear from 0 to base at the last warm-up step, then half a cosine from base toward 0 (authors' code)."""
    if step < warmup_steps:
        return base * step / max(1, warmup_steps - 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return base * 0.5 * (1 + math.cos(math.pi * progress))


def short_warmup(epochs: int) -> int:
    """Epochs of warm-up for a run of any length: a tenth, at most the paper's 5, and never all of them."""
    return min(5, max(1, epochs // 10)) if epochs > 1 else 0
