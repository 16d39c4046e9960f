"""The strategies of this folder."""

from by_fsdp import ByFsdp
from every_collective import EveryCollective
from paired import Paired
from sharded_by_hand import ShardedByHand
from unmoved import Unmoved
from worker_state import Averaged, Counted

EXTRA_STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        *(ShardedByHand, ByFsdp, Paired),
        *(Counted, Averaged, EveryCollective, Unmoved),
    )
}
