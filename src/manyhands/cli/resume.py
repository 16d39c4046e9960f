"""Continue a run where it stopped, in the same folder, on any number of workers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from manyhands.api.options import Resolved
from manyhands.api.starts import ContinuedRun, how_to_train_longer, opened
from manyhands.api.where import ResolvedCluster, find_cluster
from manyhands.cli.options import add_training_flags, fit_debug, parse_set
from manyhands.events import make_console

HELP = "continue a run where it stopped, on any number of workers"
EXAMPLES = """\
examples:
  manyhands resume runs/digits-20260101-120000
  manyhands resume runs/digits-20260101-120000 --workers 4
  manyhands resume runs/digits-20260101-120000 --set epochs=20 --schedule stretch    train longer
  manyhands resume runs/digits-20260101-120000 --max-time 50m      the next fifty minutes of it
  manyhands resume runs/digits-20260101-120000 --target accuracy=0.99   until it is that good
  manyhands resume runs/digits-20260101-120000 --set lr=0.01       with another learning rate
  manyhands resume runs/digits-20260101-120000 --checkpoint step-276   from an older checkpoint
  srun manyhands resume runs/digits-4711 --on env --key-file run.key   on many hosts
  manyhands resume runs/digits-20260101-120000 --debug             with breakpoint() in the job
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument(
        "--checkpoint",
        metavar="step-N",
        help="resume from this checkpoint (default: the newest intact one)",
    )
    parser.add_argument(
        "--schedule",
        metavar="HOW",
        help="how the learning-rate schedule continues if there are more steps than it was made for: stretch "
        "(over all steps, from its current position), restart (over the remaining steps) or keep (as it was; "
        "after its end, the rate stays the same)",
    )
    add_training_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    fit_debug(arguments)
    given = vars(arguments)
    cluster = find_cluster(Resolved(given))
    if isinstance(cluster, ResolvedCluster) and not cluster.is_coordinator:
        return cluster.serve()
    with opened(arguments.run_folder) as folder:
        changed = parse_set(arguments.set)
        start = ContinuedRun.resolve(
            folder,
            given,
            cluster,
            changed,
            warn=lambda text: print(f"warning: {text}", file=sys.stderr),
            debug=arguments.debug,
        )
        if start is None:
            print(how_to_train_longer(folder))
            return 0
        for note in start.notes:
            print(f"note: {note}")
        console = make_console(quiet=arguments.quiet, shared=arguments.debug)
        return start.launch(console, arguments.launch_plan).exit_code
