import yaml

from lightning_ups.commands.starting.conversion import Conversion


def test_no_key_is_dropped():
    found = Conversion({"a": {"b": 1, "c": "auto"}, "d": [1, 2], "e": {}, "f": None})
    assert (found.value("a.b"), found.value("a.c"), found.value("a.c", 7), found.value("none")) == (1, None, 7, None)
    found.becomes("trainer.x", "a.b", "not.given")
    found.has_none("no such section", "a")
    text = found.text()
    assert yaml.safe_load(text) == {"trainer": {"accelerator": "gpu"}}
    became, without = text.split("# No counterpart:")
    assert "# - a.b: 1 -> trainer.x\n" in became
    assert "not.given" not in text
    assert "# - a.c: auto -> no such section; transformers filled auto in" in without
    for rest in ("d: [1, 2]", "e: {}", "f: null"):
        assert f"# - {rest} -> unknown to this command\n" in without


def test_long_lines_are_wrapped():
    found = Conversion({"a": "x" * 300, "b": 2})
    found.becomes("words " * 60, "b")
    assert all(line.startswith("#") for line in found.text().partition("# What")[2].splitlines()[1:] if line)
