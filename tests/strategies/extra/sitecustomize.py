"""Makes the strategies of this folder known to every process that has it on its PYTHONPATH."""

from sharded_by_hand import ShardedByHand

from manyhands.strategies.registry import STRATEGIES

STRATEGIES[ShardedByHand.name] = ShardedByHand
