"""docs/guides/errors.md shows what is printed: each input of it is run."""

import contextlib
import io
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch
from lightning_utilities.core import imports

from lightning_ups.__main__ import main

PAGE = (Path(__file__).parent.parent / "docs/guides/errors.md").read_text()
(GOOD,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(BARE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
FOLDER = "/home/me/run"  # as the page calls it


def changed(section):
    """The files that a section is about: what it changes of the good one, by the name in its command."""
    diff = "".join(re.findall(r"^```diff\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
    text = GOOD
    for hunk in re.findall(r"(?:^[ -].*\n)+(?:^\+.*\n)*", diff, re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        assert text.count(old) == 1, old
        text = text.replace(old, "".join(line[1:] for line in lines if line[0] in " +"))
    return dict.fromkeys(re.findall(r"(w\w+\.yaml)$", section, re.MULTILINE), text) | {"good.yaml": GOOD}


def without_torchao(monkeypatch):
    known = imports._version

    def version(name):
        if name == "torchao":
            raise imports.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(imports, "_version", version)


def run(words):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main(words)
    assert code == 2
    return said.getvalue()


def flat(text):
    # Lightning's loggers print to where standard error was when they were made; and a path has a length of its own.
    told = (
        r"^(INFO: )?(Seed set to |(GPU|TPU) available: |`Trainer\(limit_val_batches|preset auto: |\(--debug shows ).*$"
    )
    return " ".join(re.sub(told, "", text, flags=re.MULTILINE).split())


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize("section", SECTIONS, ids=[section.split(".")[0] for section in SECTIONS])
def test_the_page_shows_what_is_printed(section, tmp_path, monkeypatch):
    if "built for CPUs only" in flat(section) and torch.version.cuda is not None:
        pytest.skip("of a torch that is built for CPUs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # set by the command line, and put back with this
    Path("bare.py").write_text(BARE)
    for name, text in changed(section).items():
        Path(name).write_text(text)
    ((command, expected),) = re.findall(r"^\$ (.*)\n((?s:.*?))^```", section, re.MULTILINE)
    if "PYTHONPATH=gone" in command:
        without_torchao(monkeypatch)
    printed = run(shlex.split(re.split("lightning[_-]ups ", command)[1]))
    assert flat(printed.replace(str(tmp_path), FOLDER)) == flat(expected)


def test_the_page_is_about_many_inputs():
    assert len(SECTIONS) > 10
