"""``python -m lightning_ups gate``: an exit code for CI: at most so much slower, the loss within a band."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lightning_ups.commands.compare import add_runs, sides_of, write_json
from lightning_ups.config.suggestions import parse_options
from lightning_ups.insight.compare import CANNOT_TELL, FAIL, PASS, Band, gate

_EXIT_CODES = {PASS: 0, FAIL: 1, CANNOT_TELL: 3}  # 2 is a wrong request


def main(argv: Sequence[str]) -> int:
    """Print one sentence, and return 0 if the new run passes, 1 if it fails, 3 if the runs do not tell."""
    asked = parse_options(_parser(), argv)
    sides = sides_of(asked)
    if len(sides) != 2:
        raise ValueError(f"gate takes two runs, BASE NEW, or BASE BASE vs NEW NEW; {len(asked.runs)} were given.")
    base, new = sides
    slower = None if asked.slower is None else _share("--slower", asked.slower, needs_percent=True).size
    loss = None if asked.loss is None else _share("--loss", asked.loss)
    decision = gate(base, new, slower=slower, loss=loss, metric=asked.metric, higher=asked.higher, warmup=asked.warmup)
    notes = [note for side in sides for run in side.runs for note in run.notes]
    for note in notes:
        print(note, file=sys.stderr)
    print(f"{decision.verdict}: {new.name} against {base.name}: {decision.reason}.")
    if asked.json:
        write_json(asked.json, asdict(decision) | {"base": base.name, "new": new.name, "notes": notes})
    return _EXIT_CODES[decision.verdict]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ups gate",
        description="Exit with 0 if NEW may replace BASE, with 1 if not, and with 3 if the runs do not tell.",
    )
    add_runs(parser)
    parser.add_argument("--slower", metavar="2%", help="how much slower its steps may be; default 2%%")
    parser.add_argument(
        "--loss", metavar="BAND", help="how much worse its loss, or --metric, may be: 0.01, or 1%%; default 2%%"
    )
    parser.add_argument("--metric", metavar="NAME", help="the loss; default: val_loss, else train_loss")
    direction = parser.add_mutually_exclusive_group()
    for word, value in (("higher", True), ("lower", False)):
        direction.add_argument(
            f"--{word}-is-better",
            dest="higher",
            action="store_const",
            const=value,
            help=f"a {word} --metric is better; default: known by its name, or by the callback that monitors it",
        )
    return parser


def _share(option: str, text: str, *, needs_percent: bool = False) -> Band:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (needs_percent and not text.endswith("%")):
        raise ValueError(f"{option} {text} is not a limit. Write it like {option} 2%.")
    return Band(value / 100, relative=True) if text.endswith("%") else Band(value)
