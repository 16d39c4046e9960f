"""Draw the pictures of docs/strategies/ps.md: python docs/img/ps_pictures.py

The four timelines are simulated: the policies of `manyhands.ps.policies` decide them on a virtual clock, for
three workers of which the last is slow. Colours have medium brightness and there is no background, so that
a picture can be read on white and on black.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from manyhands.ps.policies import (
    AsyncPolicy,
    BackupPolicy,
    Contribution,
    Policy,
    SspPolicy,
    SyncPolicy,
    Verdict,
)

FOLDER = Path(__file__).parent
WORKERS = ("worker-0", "worker-1", "worker-2")
SECONDS = {
    "worker-0": (1.9, 2.1, 1.8, 2.0, 2.2, 1.9, 2.0, 2.1, 1.9, 2.0),
    "worker-1": (2.3, 2.0, 2.4, 2.1, 2.2, 2.4, 2.1, 2.3, 2.2, 2.1),
    "worker-2": (3.7, 4.3, 3.9, 4.4, 4.0, 4.2, 4.1, 4.3),
}
END = 15.4

INK = "#7d8793"
BLUE, GREEN, ORANGE, RED, VIOLET = "#3d7cc9", "#2e9c6f", "#c9812b", "#d1495b", "#8a63c7"
COLOURS = dict(zip(WORKERS, (BLUE, GREEN, ORANGE), strict=True))
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


@dataclass
class Drawing:
    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, *, opacity: float = 1.0,
        line: str = "none", dash: str = "",
    ) -> None:  # fmt: skip
        self.parts.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{w:.1f}' height='{h:.1f}' rx='4' fill='{fill}' "
            f"fill-opacity='{opacity}' stroke='{line}' stroke-dasharray='{dash}'/>"
        )

    def text(
        self, x: float, y: float, words: str, *, fill: str = INK, size: float = 13,
        anchor: str = "start", bold: bool = False,
    ) -> None:  # fmt: skip
        weight = "600" if bold else "400"
        self.parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' fill='{fill}' font-size='{size}' font-weight='{weight}' "
            f"text-anchor='{anchor}'>{escape(words)}</text>"
        )

    def line(
        self, points: Sequence[tuple[float, float]], *, colour: str = INK, wide: float = 1.4,
        dash: str = "", arrow: bool = False, both: bool = False,
    ) -> None:  # fmt: skip
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        name = colour.lstrip("#")
        ends = f" marker-end='url(#a{name})'" if arrow or both else ""
        ends += f" marker-start='url(#a{name})'" if both else ""
        self.parts.append(
            f"<polyline points='{where}' fill='none' stroke='{colour}' stroke-width='{wide}' "
            f"stroke-dasharray='{dash}'{ends}/>"
        )

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        self.parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius}' fill='{fill}'/>")

    def badge(self, x: float, y: float, number: int) -> None:
        self.dot(x, y, 9, RED)
        self.text(x, y + 4, str(number), fill="#ffffff", size=11.5, anchor="middle", bold=True)

    def save(self, name: str, description: str) -> None:
        """Write the file; `description` is for screen readers."""
        heads = "".join(
            f"<marker id='a{c.lstrip('#')}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
            f"markerHeight='7' orient='auto-start-reverse'><path d='M0,0 L8,4 L0,8 z' fill='{c}'/>"
            "</marker>"
            for c in (INK, BLUE, GREEN, ORANGE, RED, VIOLET)
        )
        text = "\n".join(
            [
                f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width:g} {self.height:g}' "
                f"width='{self.width:g}' role='img' aria-label='{escape(description, quote=True)}' {FONT}>",
                f"<defs>{heads}</defs>",
                *self.parts,
                "</svg>\n",
            ]
        )
        (FOLDER / name).write_text(text)


# Timelines ----------------------------------------------------------------------------------------


@dataclass
class Bar:
    worker: str
    start: float
    stop: float
    words: str
    kind: str = "compute"
    """compute, wait, or lost"""


@dataclass
class Mark:
    """An update of the weights."""

    time: float
    version: int
    pushes: list[tuple[str, float, int]]
    """(worker, when it was pushed, staleness)"""


def play(policy: Policy, *, rounds: bool) -> tuple[list[Bar], list[Mark]]:
    """Run the three workers with this policy until END."""
    bars: list[Bar] = []
    marks: list[Mark] = []
    nth = dict.fromkeys(WORKERS, 0)
    idle: dict[str, tuple[int, float]] = dict.fromkeys(WORKERS, (1, 0.0))
    busy: dict[str, tuple[float, int, Bar]] = {}
    pushed: dict[tuple[str, int], tuple[float, Bar]] = {}
    now = 0.0
    while now < END:
        for worker, (seq, since) in list(idle.items()):
            seq = policy.resume_at(worker) if rounds else seq
            if policy.may_start(worker, seq):
                if now > since:
                    bars.append(Bar(worker, since, now, "", "wait"))
                policy.started(worker, seq)
                seconds = SECONDS[worker][nth[worker] % len(SECONDS[worker])]
                nth[worker] += 1
                bar = Bar(worker, now, now + seconds, f"step {seq}" if rounds else f"{seq}")
                bars.append(bar)
                busy[worker] = (now + seconds, seq, bar)
                del idle[worker]
        worker, (now, seq, bar) = min(busy.items(), key=lambda item: item[1][0])
        if now >= END:
            break
        del busy[worker]
        pushed[worker, seq] = (now, bar)
        if policy.push(Contribution(worker, seq)) is Verdict.LATE:
            bar.kind = "lost"
        while (update := policy.take()) is not None:
            marks.append(
                Mark(
                    now,
                    update.version,
                    [
                        (c.worker, pushed[c.worker, c.seq][0], c.staleness)
                        for c in update.contributions
                    ],
                )
            )
        for dropped in policy.dropped():
            pushed[dropped.push][1].kind = "lost"
        idle[worker] = (seq + 1, now)
    bars += [Bar(worker, since, END, "", "wait") for worker, (_, since) in idle.items()]
    return bars, marks


def timeline(name: str, title: str, policy: Policy, *, rounds: bool, notes: Sequence[str]) -> None:
    bars, marks = play(policy, rounds=rounds)
    left, scale, top, row = 92.0, 46.0, 38.0, 34.0
    drawing = Drawing(left + END * scale + 18, top + row * 4 + 62)
    drawing.text(2, 16, title, size=15, bold=True)
    lane = {worker: top + row * i for i, worker in enumerate(WORKERS)}
    weights = top + row * 3 + 18
    for worker, y in lane.items():
        drawing.text(left - 10, y + 17, worker, fill=COLOURS[worker], anchor="end", bold=True)
    drawing.text(left - 10, weights + 5, "weights", anchor="end", bold=True)
    drawing.line([(left, weights), (left + END * scale + 8, weights)], arrow=True)
    for mark in marks:
        x = left + mark.time * scale
        for worker, when, _ in mark.pushes:
            begin = left + when * scale
            drawing.line(
                [(begin, lane[worker] + 25), (begin, weights - 14), (x, weights - 5)],
                colour=COLOURS[worker],
                wide=1.2,
            )
    for bar in bars:
        x, y = left + bar.start * scale, lane[bar.worker]
        wide = (min(bar.stop, END) - bar.start) * scale
        colour = COLOURS[bar.worker]
        if bar.kind == "wait":
            drawing.line([(x + 2, y + 13), (x + wide - 2, y + 13)], dash="2 4", wide=2)
            continue
        lost = bar.kind == "lost"
        drawing.box(
            x + 0.8, y, wide - 1.6, 25, RED if lost else colour,
            opacity=0.28 if lost else 1.0, line=RED if lost else "none", dash="3 3" if lost else "",
        )  # fmt: skip
        if wide > 30:
            drawing.text(
                x + wide / 2, y + 17, bar.words + (" left out" if lost else ""),
                fill=RED if lost else "#ffffff", size=12, anchor="middle",
            )  # fmt: skip
    before = 0.0
    for mark in marks:
        x = left + mark.time * scale
        drawing.dot(x, weights, 4.5, INK if rounds else COLOURS[mark.pushes[0][0]])
        at = max(x, before + 11)  # two numbers side by side, however close
        before = at
        below = (
            str(mark.version) if rounds else ", ".join(str(stale) for _, _, stale in mark.pushes)
        )
        drawing.text(at, weights + 20, below, size=12, anchor="middle")
    label = "update" if rounds else "staleness"
    drawing.text(left - 10, weights + 20, label, size=12, anchor="end")
    for i, note in enumerate(notes):
        drawing.text(left, weights + 44 + 17 * i, note, size=12.5)
    drawing.height = weights + 52 + 17 * (len(notes) - 1)
    drawing.save(name, f"Timeline of {title}")


# Data flow ----------------------------------------------------------------------------------------------


def strip(
    drawing: Drawing, x: float, y: float, owners: Sequence[str], *, wide: float = 17,
    opacity: float = 1.0, dash: str = "",
) -> None:  # fmt: skip
    """Draw blocks in a row, in the colours of their holders."""
    for i, colour in enumerate(owners):
        drawing.box(
            x + i * (wide + 2), y, wide, 17, colour, opacity=opacity, line=colour, dash=dash
        )


def worker_box(drawing: Drawing, x: float, y: float, name: str, colour: str, server: str) -> None:
    drawing.box(x, y, 152, 132, colour, opacity=0.10, line=colour)
    drawing.text(x + 12, y + 21, name, fill=colour, bold=True)
    drawing.text(x + 12, y + 43, "forward, backward", size=12.5)
    drawing.line([(x + 8, y + 56), (x + 144, y + 56)], colour=colour, wide=0.8, dash="3 3")
    drawing.text(x + 12, y + 76, server, size=12.5)


def data_flow() -> None:
    drawing = Drawing(860, 640)
    mine, theirs = [BLUE] * 4, [GREEN] * 4
    faded = 0.22
    drawing.text(2, 18, "Inside a host: shared memory", size=15, bold=True)
    drawing.box(226, 34, 408, 230, INK, opacity=0.07, line=INK)
    drawing.text(238, 56, "shared memory", bold=True)
    for i, (words, owners, opacity) in enumerate(
        [
            ("parameters, once per host", mine + theirs, 1.0),
            ("gradients of worker-0", mine + theirs, faded),
            ("gradients of worker-1", mine + theirs, faded),
            ("sums, of the last two updates", mine + theirs, 0.5),
            ("table of rounds (ps:sync)", [INK] * 8, faded),
        ]
    ):
        y = 72 + 38 * i
        drawing.text(238, y + 13, words, size=12.5)
        strip(drawing, 462, y, owners, opacity=opacity)
    worker_box(drawing, 8, 58, "worker-0", BLUE, "server, the leader")
    worker_box(drawing, 700, 58, "worker-1", GREEN, "server")
    for x, own, kept in ((20, mine, theirs), (712, theirs, mine)):
        drawing.text(x, 156, "own", size=12)
        strip(drawing, x + 48, 143, own)
        drawing.text(x, 180, "replica", size=12)
        strip(drawing, x + 48, 167, kept, opacity=faded, dash="3 2")
    drawing.line([(226, 84), (162, 96)], colour=BLUE, arrow=True)
    drawing.line([(162, 106), (226, 120)], colour=BLUE, arrow=True)
    drawing.line([(634, 84), (698, 96)], colour=GREEN, arrow=True)
    drawing.line([(698, 106), (634, 158)], colour=GREEN, arrow=True)
    drawing.line([(776, 192), (776, 292), (84, 292), (84, 194)], colour=RED, both=True)
    drawing.text(96, 284, "ps:sync: doorbell", size=12.5)
    drawing.text(226, 284, "others:", size=12.5)
    for x, number, words in (
        (288, 1, "push"),
        (352, 2, "decide"),
        (430, 3, "replica, taken"),
        (550, 4, "new"),
    ):
        drawing.badge(x, 292, number)
        drawing.text(x + 13, 284, words, size=12.5)
    words = "small messages only: the numbers stay where they are, and all can read them"
    drawing.text(430, 316, words, size=12.5, anchor="middle")

    top = 352
    drawing.text(2, top, "Over the network: TCP", size=15, bold=True)
    for x, name, colour, server, own, kept in (
        (8, "worker-0", BLUE, "server, the leader", mine, theirs),
        (700, "worker-1", GREEN, "server", theirs, mine),
    ):
        drawing.box(x, top + 20, 152, 222, colour, opacity=0.10, line=colour)
        drawing.text(x + 12, top + 41, name, fill=colour, bold=True)
        drawing.text(x + 12, top + 63, "parameters", size=12)
        strip(drawing, x + 12, top + 70, mine + theirs, wide=14)
        drawing.text(x + 12, top + 107, "gradients", size=12)
        strip(drawing, x + 12, top + 114, mine + theirs, wide=14, opacity=faded)
        drawing.line(
            [(x + 8, top + 145), (x + 144, top + 145)], colour=colour, wide=0.8, dash="3 3"
        )
        drawing.text(x + 12, top + 165, server, size=12.5)
        drawing.text(x + 12, top + 191, "own", size=12)
        strip(drawing, x + 60, top + 178, own)
        drawing.text(x + 12, top + 223, "replica", size=12)
        strip(drawing, x + 60, top + 210, kept, opacity=faded, dash="3 2")
    ways = [
        (50, 1, "gradients, in spans; in ps:sync while the backward still runs", True),
        (84, 2, "had: the leader counts a push that every server has", False),
        (114, 3, "decide: what the next update is", False),
        (148, 4, "the sum, to the replica holder; held", True),
        (182, 5, "commit: all apply", False),
        (216, 6, "new parameters, in the order in which the forward needs them", True),
    ]
    for y, number, words, bulk in ways:
        drawing.line(
            [(170, top + y), (690, top + y)], colour=VIOLET if bulk else INK,
            wide=3 if bulk else 1.4, both=True,
        )  # fmt: skip
        drawing.badge(200, top + y, number)
        drawing.text(218, top + y - 6, words, size=12.5)
    drawing.text(
        430, top + 262, "thick: numbers; thin: small messages. Each colour is a server's blocks.",
        size=12.5, anchor="middle",
    )  # fmt: skip
    drawing.height = top + 276
    drawing.save(
        "ps-data.svg",
        "Data flow: inside a host gradients and parameters are in shared memory and only small "
        "messages are sent; over TCP gradients, sums for replicas and new parameters are sent",
    )


def main() -> None:
    timeline(
        "ps-sync.svg",
        "ps:sync",
        SyncPolicy(WORKERS),
        rounds=True,
        notes=[
            "An update is the gradients of all workers. The fast ones wait (dots) for the slow one."
        ],
    )
    timeline(
        "ps-backup.svg",
        "ps:backup(spares=1)",
        BackupPolicy(WORKERS, spares=1),
        rounds=True,
        notes=[
            "An update is the first two of three gradients. A late one is left out, and its samples are",
            "computed again; its worker continues with the others.",
        ],
    )
    timeline(
        "ps-async.svg",
        "ps:async",
        AsyncPolicy(WORKERS),
        rounds=False,
        notes=[
            "Each push is an update. Nobody waits; the gradients of the slow worker are the stalest."
        ],
    )
    timeline(
        "ps-ssp.svg",
        "ps:ssp(staleness=1)",
        SspPolicy(WORKERS, staleness=1),
        rounds=False,
        notes=["Like async, but no worker starts a step more than one ahead of the slowest."],
    )
    data_flow()


if __name__ == "__main__":
    main()
