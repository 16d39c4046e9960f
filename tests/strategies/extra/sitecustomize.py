"""Makes the strategies of this folder known to every process that has it on its PYTHONPATH."""

from extra_strategies import EXTRA_STRATEGIES

from manyhands.strategies.registry import STRATEGIES

STRATEGIES |= EXTRA_STRATEGIES
