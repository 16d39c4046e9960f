"""Draw docs/img/train.svg, the terminal during a run: python docs/img/train_picture.py RUN [STEP]

RUN is the folder of a run, such as one of `make demo`. Its events are replayed, up to STEP, into the
console that a terminal gets, and what it shows then becomes the picture.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console as Rich

from manyhands.events import events, read_events
from manyhands.events.terminal import RichConsole

PICTURE = Path(__file__).with_name("train.svg")
COLUMNS = 96


class Terminal(RichConsole):
    """Draws the live line once, at the end: a recording can't erase what it has recorded."""

    over = False

    def _draw(self) -> None:
        if self.over:
            super()._draw()

    def progress(self) -> None:
        pass


def replay(run: Path, last_step: int) -> Rich:
    out = Rich(
        file=io.StringIO(),
        record=True,
        width=COLUMNS,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console = Terminal(out, out)
    for record in read_events(run / "events.jsonl"):
        event: events.Event = getattr(events, record.pop("event"))(**record)
        if isinstance(event, events.RunStarted):
            workers = f"--strategy {event.strategy} --workers {event.workers}"
            out.print(f"$ manyhands train {event.job} {workers}", style="bold")
        if isinstance(event, events.StepCommitted) and event.step > last_step:
            break
        console.handle(event)
    console.over = True
    console._draw()
    return out


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    step = int(sys.argv[2]) if len(sys.argv) > 2 else 170
    svg = replay(folder, step).export_svg(title="manyhands")
    svg = re.sub(
        r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL
    )  # nothing is fetched to show it
    PICTURE.write_text(svg, encoding="utf-8")
