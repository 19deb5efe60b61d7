import subprocess
import sys

import pytest
import yaml

from lightning_ups.config import presets


def test_each_has_a_comment_and_settings():
    assert {"a100", "cpu", "h100"} <= {*presets.names()}
    for name in presets.names():
        assert presets.text(name).startswith("# ")
        assert 20 < len(presets.comment(name)) < 120
        assert isinstance(yaml.safe_load(presets.text(name)), dict)


def test_one_line_each(capsys):
    assert presets.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(presets.names()) + 1
    for line, name in zip(lines, ["auto", *presets.names()], strict=True):
        assert line.startswith(name)
    assert presets.comment("cpu") in lines[presets.names().index("cpu") + 1]


def test_the_yaml_of_one(capsys):
    assert presets.main(["cpu"]) == 0
    assert capsys.readouterr().out == presets.text("cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10", r"Did you mean 'h100'\?$"),
        ("gpu", "Use 'auto', .* or one of: a100, cpu, h100, h200-fp8, memory"),
        ("auto", "cpu, a100 or h100"),
        ("../presets/cpu", "presets/cpu"),
    ],
)
def test_names_of_no_preset(name, message):
    with pytest.raises(ValueError, match=message):
        presets.text(name)


def test_torch_is_not_imported():
    code = "import sys; from lightning_ups.config.presets import main; main([]); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_hopper_takes_the_fastest_attention():
    """Where it was measured; elsewhere torch chooses as it does."""
    asked = {name: yaml.safe_load(presets.text(name)).get("flags", {}).get("attention") for name in presets.names()}
    assert {name for name, attention in asked.items() if attention} == {"h100", "h200-fp8"}
    assert {asked["h100"], asked["h200-fp8"]} == {"auto"}
