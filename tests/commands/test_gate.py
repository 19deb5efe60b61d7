"""`gate` returns an exit code and says why in one sentence."""

import json

import pytest

from tests.command import assert_short, folder, ups  # noqa: F401
from tests.commands.test_compare import logs, rotated  # noqa: F401

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize(
    ("new", "options", "code", "parts"),
    [
        (
            1,
            [],
            0,
            ("PASS: version_1 against version_0: a typical step is", "at most 2.0 % is allowed", "train_loss is"),
        ),
        (2, ["--slower", "1%"], 1, ("FAIL: version_2 against version_0: a typical step is 3.",)),
        (2, ["--slower", "5%"], 0, ("PASS", "at most 5.0 % is allowed")),
        (3, ["--loss", "0.1"], 1, ("FAIL: version_3 against version_0: train_loss is 2.5", "at most 0.1 worse")),
        (3, ["--loss", "50%", "--metric", "train_loss"], 0, ("PASS", "at most 0.998 (50 %) worse is allowed")),
        (3, ["--metric", "train_loss", "--higher-is-better"], 0, ("PASS",)),
        (
            1,
            ["--loss", "0.01"],
            3,
            ("CANNOT TELL: version_1 against version_0: train_loss", "logged values would tell"),
        ),
        (
            1,
            ["--slower", "0.1%"],
            3,
            ("CANNOT TELL: version_1 against version_0: a typical step", "allow more by --slower"),
        ),
    ],
)
def test_the_exit_code_and_one_sentence(ups, logs, new, options, code, parts):  # noqa: F811
    done = ups("gate", logs(0), logs(new), *options)
    assert done.code == code, done.err
    (line,) = done.out.splitlines()
    for part in parts:
        assert part in line


def test_several_runs_on_each_side(ups, logs):  # noqa: F811
    same = [logs(0), logs(1)]
    done = ups("gate", *same, "vs", *reversed(same), "--slower", "100%", "--loss", "100%")
    assert done.code == 0, done.out
    assert done.out.startswith("PASS: version_1 and 1 more against version_0 and 1 more: a typical step is")
    # One of the new runs is slower, the other has a worse loss: the runs of a side differ too much to tell.
    done = ups("gate", *same, "vs", logs(2), logs(3), "--metric", "train_loss", "--loss", "0.3")
    assert done.code == 3, done.out
    assert "CANNOT TELL: version_2 and 1 more" in done.out


def test_matched_steps_that_contradict_the_averages_are_named(ups, rotated):  # noqa: F811
    out = ups("gate", "b.csv", "a.csv", "--slower", "100%").out
    assert "a typical step is 11 % slower at matched steps, while the runs' averages differ by -26 % (99 %" in out


def test_json(ups, logs, folder):  # noqa: F811
    assert ups("gate", logs(0), logs(3), "--json", "gate.json").code == 1
    found = json.loads((folder / "gate.json").read_text())
    assert (found["verdict"], found["base"], found["new"]) == ("FAIL", "version_0", "version_3")
    assert "train_loss is 2.5" in found["reason"]


def test_a_file_that_is_not_used_is_named(ups, logs, folder):  # noqa: F811
    (folder / logs(1) / "step_times.csv").write_text("step,step_ms\n")
    done = ups("gate", logs(0), logs(1), "--json", "gate.json")
    assert done.code == 0
    (line,) = done.err.splitlines()
    assert "step_times.csv is not used" in line
    assert json.loads((folder / "gate.json").read_text())["notes"] == [line]


def test_errors_are_short(ups, logs):  # noqa: F811
    assert_short(ups("gate", logs(0)), "gate takes two runs")
    assert_short(ups("gate", logs(0), logs(1), logs(2)), "BASE BASE vs NEW NEW")
    assert_short(ups("gate", logs(0), logs(1), "--slower", "2"), "--slower 2 is not a limit", "--slower 2%")
    assert_short(ups("gate", logs(0), logs(1), "--loss", "much"), "--loss much is not a limit")
    assert_short(ups("gate", logs(0), logs(1), "--metric", "los"), "--metric los is not in all runs")
    both = ("--higher-is-better", "--lower-is-better")
    assert_short(ups("gate", logs(0), logs(1), *both), "not allowed with")
