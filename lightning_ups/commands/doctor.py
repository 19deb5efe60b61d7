"""``python -m lightning_ups doctor``: the machine, its packages, and what can run here and why not."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lightning_ups.config.suggestions import parse_options, suggest

if TYPE_CHECKING:  # these import torch, and that it does not load is for this command to say
    from lightning_ups.commands.machine.packages import Machine

SCHEMA = 1
_STYLES = {"runs": "green", "limited": "yellow", "no": "red"}
_MARKS = {"runs": "yes", "limited": "limited", "no": "no"}


def main(argv: Sequence[str]) -> int:
    """Print what this machine can do.

    Returns:
        0, or 2 if torch does not load or something that ``--require`` names does not run here.
    """
    asked = parse_options(_parser(), argv)
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        print(
            f"torch does not load: {error}. Nothing else can be looked at without it."
            " Install it anew, as pytorch.org/get-started says for this machine.",
            file=sys.stderr,
        )
        return 2
    _check_names(asked.require)
    report = examination()
    missing = [row for row in report["techniques"] if row["name"] in asked.require and row["verdict"] == "no"]
    if asked.json:
        print(json.dumps(report, indent=2, default=str))
    else:
        _print(report, Console(highlight=False, soft_wrap=True))
    for row in missing:
        cure = f" To change that: {row['cure']}." if row["cure"] else ""
        print(f"{row['name']} is required and does not run here: {row['why']}.{cure}", file=sys.stderr)
    return 2 if missing else 0


def examination() -> dict[str, Any]:
    """Return everything that ``--json`` prints; its keys stay, and new ones may join them."""
    # First, since it imports much of torch, which the processes that import packages then have.
    from lightning_ups.commands.machine.hardware import TECHNIQUES, examine
    from lightning_ups.commands.machine.hazards import warnings_for
    from lightning_ups.commands.machine.packages import look

    machine = look()
    # Before the packages, which are being imported meanwhile: few techniques wait for one.
    techniques = [
        {"name": technique.name, "title": technique.title, "group": technique.group}
        | asdict(examine(technique, machine))
        for technique in TECHNIQUES
    ]
    return {
        "schema": SCHEMA,
        "machine": _machine(machine),
        "packages": _packages(machine),
        "techniques": techniques,
        "warnings": [asdict(advice) for advice in warnings_for(machine)],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_ups doctor", description="Show the machine, its packages, and what can run here."
    )
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument(
        "--require",
        metavar="NAME",
        nargs="+",
        action="extend",
        default=[],
        help="exit with 2 unless these run here, such as: --require bf16 float8-tensorwise",
    )
    return parser


def _check_names(required: Sequence[str]) -> None:
    from lightning_ups.commands.machine.hardware import TECHNIQUES

    names = [technique.name for technique in TECHNIQUES]
    for name in required:
        if name not in names:
            raise ValueError(
                f"--require {name} names no technique. It takes the names in the first column of doctor's table."
                f" {suggest(name, names, most=len(names))}"
            )


def _machine(machine: "Machine") -> dict[str, Any]:
    from lightning_ups._compat.environment import versions

    found = versions()
    return {
        "host": dict(machine.host),
        "gpus": [dict(gpu) for gpu in machine.gpus],
        "unlinked_gpus": [list(pair) for pair in machine.unlinked],
        "threads": machine.threads,
        "versions": {name: found.get(name) for name in ("python", "torch", "cuda", "cudnn", "nccl", "driver")},
        "environment": dict(machine.environment),
    }


def _packages(machine: "Machine") -> dict[str, Any]:
    from lightning_ups.commands.machine.packages import KNOWN, Package

    cures = {known.name: known.cure for known in KNOWN}
    names = dict.fromkeys([*machine.packages, *cures])
    found = {}
    for name in names:
        package = machine.packages.get(name, Package(version=None))
        loads = package.version is not None and package.loads
        cure = "" if loads else package.cure or cures.get(name, "")
        found[name] = {"version": package.version, "loads": loads, "error": package.error, "cure": cure}
    return found


# For people


def _print(report: dict[str, Any], console: Console) -> None:
    for title, lines in (
        ("machine", _machine_lines(report["machine"])),
        ("packages", _package_lines(report["packages"])),
        *_technique_sections(report["techniques"]),
        ("warnings", _warning_lines(report["warnings"])),
    ):
        console.print(Text(title, style="bold"))
        for line in lines:
            console.print(line)
        console.print()


def _machine_lines(machine: dict[str, Any]) -> Iterator[Text]:
    host, versions = machine["host"], machine["versions"]
    memory = min(filter(None, (host["memory"], host["memory_limit"])), default=None)
    size = f", {_gib(memory)} GiB" if memory else ""
    yield Text(f"  {host['processor']}, {host['usable_cores']} of {host['cores']} cores usable{size}")
    for gpu in machine["gpus"]:
        yield Text(f"  GPU {gpu['index']}: {', '.join(_gpu(gpu))}")
    if not machine["gpus"]:
        yield Text("  no GPU that torch can use")
    yield Text(f"  {', '.join(f'{name} {number}' for name, number in versions.items() if number)}")


def _gpu(gpu: dict[str, Any]) -> Iterator[str]:
    yield gpu["name"]
    yield f"compute capability {gpu['capability'][0]}.{gpu['capability'][1]}"
    yield f"{_gib(gpu['memory'])} GiB"
    if "power_limit_w" in gpu:
        yield f"limited to {gpu['power_limit_w']:.0f} W"
    if "clock_mhz" in gpu and "max_clock_mhz" in gpu:
        yield f"{gpu['clock_mhz']} of {gpu['max_clock_mhz']} MHz now"
    if gpu.get("nvlinks"):
        yield f"{gpu['nvlinks']} NVLinks"
    if gpu.get("slowed_by"):
        yield f"slowed: {' and '.join(gpu['slowed_by'])}"


def _package_lines(packages: dict[str, Any]) -> Iterator[Text]:
    width = max(map(len, packages))
    for name, package in packages.items():
        if package["loads"]:
            yield _row(name, width, "green", package["version"])
        elif package["version"] is None:
            yield _row(name, width, "dim", "not installed", cure=package["cure"])
        else:
            broken = f"{package['version']} does not load: {package['error']}"
            yield _row(name, width, "red", broken, cure=package["cure"])


def _technique_sections(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[Text]]]:
    width = max(len(row["name"]) for row in rows)
    for group in dict.fromkeys(row["group"] for row in rows):
        yield group, [_technique(row, width) for row in rows if row["group"] == group]


def _technique(row: dict[str, Any], width: int) -> Text:
    said = f"{row['title']}{': ' if row['why'] else ''}{row['why']}"
    return _row(row["name"], width, _STYLES[row["verdict"]], f"{_MARKS[row['verdict']]:8}", said, cure=row["cure"])


def _warning_lines(warnings: Sequence[dict[str, str]]) -> Iterator[Text]:
    if not warnings:
        yield Text("  none")
    for advice in warnings:
        yield Text.assemble("  ", (advice["what"], "yellow"), f" {advice['why']} {advice['cure']}")


def _row(name: str, width: int, style: str, styled: str, plain: str = "", *, cure: str = "") -> Text:
    return Text.assemble(f"  {name:{width}}  ", (styled, style), plain, (f" -> {cure}" if cure else "", "cyan"))


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.0f}"
