"""What breaks with the newest torch and Lightning: patches that do not fit, and tests that fail.

    python benchmarks/newest.py                                              # the newest of both, in a new environment
    python benchmarks/newest.py --torch 2.14.1 --lightning 2.6.6 --output newest.json
    python benchmarks/newest.py --python-environment PATH --tests tests/test_public.py

A new environment has the other packages in the versions of constraints.txt. The fast tests run there, and those that
train the benchmark's modules on a CPU. The exit code is 1 if something is broken. For nightly builds, set PIP_PRE=1 and
PIP_EXTRA_INDEX_URL, which pip reads.
"""

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from processes import ROOT, finished, result_of

CHOSEN = ("torch", "lightning", "pytorch-lightning")
PARTS = {"fast tests": ["-m", "fast"], "zoo on a CPU": ["-m", "slow or not slow", "tests/benchmarks/test_zoo.py"]}
ASK = """
import json, platform
from importlib.metadata import distributions
found = {"versions": {"python": platform.python_version()}}
names = ("torch", "lightning", "triton", "torchao", "transformers", "numpy")
versions = {each.name: each.version for each in distributions()}
found["versions"] |= {name: versions[name] for name in names if name in versions}
try:
    from lightning_ups._compat.patches import misfits
    found["patches"] = {target.replace(":", "."): reason for target, reason in misfits().items()}
except Exception as error:
    found["patches"] = {"the register": f"{type(error).__name__}: {error}"}
print("\\nRESULT", json.dumps(found))
"""


def install(folder: Path, versions: Mapping[str, str | None], *, limit: float) -> Path:
    """Make an environment in ``folder``, and return it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    others = _without_chosen([*project["dependencies"], *project["optional-dependencies"]["test"], "hatchling"])
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(_without_chosen((ROOT / "constraints.txt").read_text().splitlines())))
    chosen = [name if version is None else f"{name}=={version}" for name, version in versions.items()]
    environment = folder / "environment"
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    for command in (
        [sys.executable, "-m", "venv", str(environment)],
        [*pip, "--constraint", str(constraints), *chosen, *others],
        [*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
    ):
        said = finished([*command], timeout=limit)
        if re.search(r"^ERROR:|ended (after|with)", said, flags=re.MULTILINE):
            raise SystemExit(f"{' '.join(command[:5])} failed:\n{said}")
    return environment


def _without_chosen(requirements: Iterable[str]) -> list[str]:
    return [each for each in requirements if re.split(r"[^\w.-]", each, maxsplit=1)[0].lower() not in CHOSEN]


def check(environment: Path, parts: Mapping[str, Sequence[str]], *, workers: int, limit: float) -> dict[str, Any]:
    """Return the versions in ``environment``, the patches that do not fit, and what the tests of each part came to."""
    python = str(environment / "bin" / "python")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    asked = result_of(finished([python, "-c", ASK], timeout=limit, environment=variables))
    found: dict[str, Any] = {"versions": {}, "patches": {"the register": asked.pop("error", "")}} | asked
    found["tests"] = {}
    for name, words in parts.items():
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers), "--tb=short"]
            command += ["-c", "pyproject.toml", f"--junitxml={report}", "-o", "junit_family=xunit1", *words]
            began = time.monotonic()
            said = finished(command, timeout=limit, environment=variables)
            found["tests"][name] = _outcome(report, said) | {"seconds": round(time.monotonic() - began, 1)}
    return found


def _outcome(report: Path, said: str) -> dict[str, Any]:
    counts = {"passed": 0, "skipped": 0, "broken": {}}
    if not report.exists():
        return counts | {"broken": {"pytest": said[-2000:]}}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = next((each for each in case if each.tag in ("failure", "error")), None)
        if wrong is not None:
            counts["broken"][f"{case.get('file')}::{case.get('name')}"] = (wrong.get("message") or "?")[:300]
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    if not counts["passed"] + len(counts["broken"]):
        counts["broken"] = {"pytest": said[-2000:]}
    return counts


def table(found: Mapping[str, Any]) -> str:
    """Return what `check` has found, as a table of Markdown and the reasons below it."""
    lines = [", ".join(f"{name} {version}" for name, version in found["versions"].items()), ""]
    lines += ["| part | passed | skipped | broken | seconds |", "|---|---|---|---|---|"]
    lines.append(f"| patches | | | {len(found['patches'])} | |")
    broken = dict(found["patches"])
    for name, part in found["tests"].items():
        lines.append(
            f"| {name} | {part['passed']} | {part['skipped']} | {len(part['broken'])} | {part['seconds']:.0f} |"
        )
        broken |= part["broken"]
    return "\n".join([*lines, "", *(f"- {name}: {reason.strip()}" for name, reason in broken.items())])


def main() -> None:
    """Check one environment, and print what is broken there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="VERSION", help="default: the newest")
    parser.add_argument("--lightning", metavar="VERSION", help="default: the newest")
    parser.add_argument("--python-environment", type=Path, metavar="PATH", help="use this one, and install nothing")
    parser.add_argument("--tests", type=shlex.split, metavar="WORDS", help="what pytest gets, such as '-m slow tests'")
    parser.add_argument("--workers", type=int, default=2, help="processes of tests")
    parser.add_argument("--limit", type=float, default=3600, help="seconds that an installation or a part may take")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the result is kept as JSON")
    options = parser.parse_args()
    if options.python_environment and (options.torch or options.lightning):
        parser.error("--python-environment has its versions: leave out --torch and --lightning")
    parts = {"tests": options.tests} if options.tests else PARTS
    output = options.output and options.output.resolve()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        environment = options.python_environment or install(
            Path(folder), {"torch": options.torch, "lightning": options.lightning}, limit=options.limit
        )
        found = check(environment, parts, workers=options.workers, limit=options.limit)
    print(table(found))
    if output:
        output.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(found["patches"]) or any(part["broken"] for part in found["tests"].values()))


if __name__ == "__main__":
    main()
