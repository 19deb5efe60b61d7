import pytest
import torch
import yaml
from lightning.pytorch import Callback

import lightning_ups.precision
import lightning_ups.strategies  # noqa: F401  (so that its class names are known)
from lightning_ups.callbacks import AccelerationFlags
from lightning_ups.config import presets
from lightning_ups.config.command_line import preset_of_device, read_command_line

SLOTS: dict[str, type[Callback]] = {"flags": AccelerationFlags}
COMPILE = {"class_path": "lightning_ups.callbacks.Compile", "init_args": {"mode": "default"}}
PRESETS = {
    "fast": {"trainer": {"callbacks": [COMPILE], "max_epochs": 5}, "flags": {"tf32": True}},
    "precise": {"trainer": {"plugins": [{"class_path": "BF16Precision"}]}},
    "named": {"trainer": {"precision": "bf16-mixed"}},
    "cpu": {"trainer": {"accelerator": "cpu"}},
    "h100": {"trainer": {"accelerator": "gpu"}},
}


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Return the request of a command line with ``run.yaml``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(presets, "_FOLDER", tmp_path / "presets")
    (tmp_path / "presets").mkdir()
    for name, tree in PRESETS.items():
        (tmp_path / "presets" / f"{name}.yaml").write_text(f"# about {name}\n" + yaml.safe_dump(tree))

    def ask(tree, *words):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        return read_command_line(["fit", *words, "--config", "run.yaml"], slots=SLOTS)

    return ask


def lists(request):
    """The merged lists that the parser gets."""
    assert all("callbacks" not in layer.tree.get("trainer", {}) for layer in [*request.texts.values()][:-1])
    return [*request.texts.values()][-1].tree.get("trainer", {})


def spec(name, **settings):
    return {"class_path": name, "init_args": settings} if settings else {"class_path": name}


def test_options_follow_files_and_lists(ask):
    request = ask({"trainer": {"max_epochs": 1}}, "--trainer.devices=1", "--trainer.callbacks+=Compile")
    assert request.words == ["fit", "--config", "run.yaml", "--config", "merged lists", "--trainer.devices=1"]
    assert lists(request) == {"callbacks+": [spec("Compile")]}
    assert [layer.name for layer in request.given] == ["run.yaml", "the command line"]
    assert request.given[1].tree == {"trainer": {"devices": "1", "callbacks+": [spec("Compile")]}}


@pytest.mark.parametrize("words", [["--preset", "fast"], ["--preset=fast"], []])
def test_a_preset_is_below_the_file(ask, words):
    tree = {"trainer": {"max_epochs": 1, "callbacks": ["EarlyStopping"]}, "preset": "fast"}
    request = ask(tree, *words)
    assert request.words == [
        "fit",
        *("--config", "preset fast", "--config", "run.yaml", "--config", "merged lists"),
    ]
    assert request.texts["preset fast"].tree["trainer"] == {"max_epochs": 5}
    assert request.texts["run.yaml"].tree == {"trainer": {"max_epochs": 1}}
    assert lists(request) == {"callbacks": [COMPILE, spec("EarlyStopping")]}
    assert request.preset == "fast"
    assert request.notes == ["preset fast: about fast", "run.yaml:5: trainer.max_epochs 1 instead of 5"]


def test_the_command_line_chooses_the_preset(ask):
    assert ask({"preset": "fast"}, "--preset", "none").preset is None
    assert ask({"preset": "fast"}, "--preset", "cpu").preset == "cpu"


@pytest.mark.parametrize(
    ("trainer", "words", "merged", "note"),
    [
        ({"callbacks": [spec("Compile", mode="auto")]}, [], [("Compile", {"mode": "auto"})], "mode auto instead of"),
        ({"callbacks": "Compile"}, [], [("Compile", {"mode": "default"})], None),
        (
            {"callbacks+": [spec("Compile", scope="model")]},
            [],
            [("Compile", {"mode": "default", "scope": "model"})],
            None,
        ),
        (
            {"callbacks": [spec("Compile", mode="a"), spec("Compile", mode="b")]},
            [],
            [("Compile", {"mode": "a"}), ("Compile", {"mode": "b"})],
            None,
        ),
        ({"callbacks": None}, [], [("Compile", {"mode": "default"})], None),
        ({"callbacks-": ["Compile"]}, [], [], "without Compile"),
        ({}, ["--trainer.callbacks-=Compile"], [], "the command line: without Compile"),
        ({}, ["--trainer.callbacks=Timer"], [("Compile", {"mode": "default"}), ("Timer", {})], None),
        ({"callbacks": ["Timer"]}, ["--trainer.callbacks", "null"], [("Compile", {"mode": "default"})], None),
        (
            {},
            ["--trainer.callbacks.Compile.mode=auto"],
            [("Compile", {"mode": "auto"})],
            "mode auto instead of default",
        ),
        (
            {"callbacks": ["Timer"]},
            ["--trainer.callbacks.Timer.verbose", "false"],
            [("Compile", {"mode": "default"}), ("Timer", {"verbose": "false"})],
            None,
        ),
        (
            {},
            ["--trainer.callbacks+=Timer", "--trainer.callbacks.verbose=false", "--trainer.callbacks+=Compile"],
            [("Timer", {"verbose": "false"}), ("Compile", {"mode": "default"})],
            None,
        ),
        (
            {},
            ["--trainer.callbacks+=[Timer, {class_path: EarlyStopping, init_args: {monitor: a}}]"],
            [("Compile", {"mode": "default"}), ("Timer", {}), ("EarlyStopping", {"monitor": "a"})],
            None,
        ),
    ],
)
def test_lists_are_merged_by_class(ask, trainer, words, merged, note):
    request = ask({"trainer": trainer}, "--preset", "fast", *words)
    found = [
        (item["class_path"].rpartition(".")[2], item.get("init_args", {}))
        for item in lists(request).get("callbacks") or []
    ]
    assert found == merged
    assert [line for line in request.notes if note and note in line] or request.notes == ["preset fast: about fast"]


def test_files_replace_the_lists_of_earlier_files(ask, tmp_path):
    (tmp_path / "first.yaml").write_text("trainer: {callbacks: [Timer]}\n")
    words = ["--config", "first.yaml"]
    assert lists(ask({"trainer": {"callbacks": ["EarlyStopping"]}}, *words)) == {"callbacks": [spec("EarlyStopping")]}
    both = [spec("Timer"), spec("EarlyStopping")]
    assert lists(ask({"trainer": {"callbacks+": ["EarlyStopping"]}}, *words)) == {"callbacks": both}


@pytest.mark.parametrize(
    ("preset", "trainer", "words", "kept"),
    [
        ("precise", {"precision": "32-true"}, [], []),
        ("precise", {}, ["--trainer.precision=32-true"], []),
        ("precise", {"precision": None}, [], ["BF16Precision"]),
        ("precise", {"plugins": ["lightning.pytorch.plugins.DoublePrecision"]}, [], ["DoublePrecision"]),
        ("precise", {"plugins+": ["AsyncCheckpointIO"]}, [], ["BF16Precision", "AsyncCheckpointIO"]),
        ("precise", {"plugins": [spec("BF16Precision", weights="masters")]}, [], ["BF16Precision"]),
    ],
)
def test_a_precision_of_the_user_replaces_the_presets(ask, preset, trainer, words, kept):
    request = ask({"trainer": trainer}, "--preset", preset, *words)
    assert [item["class_path"].rpartition(".")[2] for item in lists(request).get("plugins", [])] == kept


def test_a_plugin_of_the_user_replaces_the_presets_precision(ask):
    request = ask({"trainer": {"plugins": ["BF16Precision"]}}, "--preset", "named")
    assert "precision" not in request.texts["preset named"].tree["trainer"]
    assert "BF16Precision instead of precision bf16-mixed" in request.notes[-1]


@pytest.mark.parametrize(
    ("plugins", "words", "named"),
    [
        (["BF16Precision"], [], ["run.yaml:4: precision bf16-mixed", "run.yaml:3: BF16Precision"]),
        ([], ["--trainer.plugins+=BF16Precision"], ["run.yaml:3: precision bf16-mixed", "command line: BF16Precision"]),
    ],
)
@pytest.mark.parametrize("preset", ["named", "none"])
def test_two_precisions_of_the_user_are_refused_as_they_are_written(ask, plugins, words, named, preset):
    with pytest.raises(ValueError, match="Two precisions") as caught:
        ask({"trainer": {"plugins": plugins, "precision": "bf16-mixed"}}, "--preset", preset, *words)
    assert all(each in str(caught.value) for each in named)


def test_a_precision_that_is_typed_as_null_leaves_one(ask):
    ask({"trainer": {"plugins": ["BF16Precision"], "precision": "bf16-mixed"}}, "--trainer.precision=null")


@pytest.mark.parametrize(
    ("tree", "words", "flags"),
    [
        ({"flags": False}, [], {"enabled": False}),
        ({"trainer": {"callbacks": [spec("AccelerationFlags", tf32=False)]}}, [], {"tf32": False}),
        (
            {"trainer": {"callbacks": [spec("AccelerationFlags", tf32=False)]}, "flags": {"tf32": True}},
            [],
            {"tf32": True},
        ),
        (
            {"flags": False},
            ["--trainer.callbacks+=AccelerationFlags", "--trainer.callbacks.tf32=false"],
            {"enabled": True, "tf32": "false"},
        ),
    ],
)
def test_a_callback_with_a_section_moves_into_it(ask, tree, words, flags):
    request = ask(tree, *words)
    assert [*request.texts.values()][-1].tree["flags"] == flags
    assert not lists(request).get("callbacks")


def test_words_are_written_out(ask):
    request = ask({}, "--flags", "false", "--trainer.strategy", "FSDP2Strategy")
    assert request.words[-2:] == ["--flags.enabled=false", '--trainer.strategy={"class_path": "FSDP2Strategy"}']
    assert ask({"trainer": {"strategy": "FSDP2Strategy"}}).texts["run.yaml"].tree["trainer"]["strategy"] == spec(
        "FSDP2Strategy"
    )


def test_empty_sections_are_left_out(ask):
    request = ask({"trainer": None, "flags": None, "model": {"class_path": "M", "init_args": None}})
    assert request.texts["run.yaml"].tree == {"model": {"class_path": "M"}}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--preset", "fastt"], "'fast'"),
        (["--preset", ""], "preset is ''"),
        (["--trainer.callbacks-=Compile"], "callbacks-.*--preset"),
        (["--preset=fast", "--trainer.callbacks-=Compil"], "Compil.*'Compile'"),
        (["--trainer.callbacks.Compile.mode=auto"], r"no Compile.*--trainer\.callbacks\+=Compile"),
        (["--preset=fast", "--trainer.callbacks.Compil.mode=auto"], "'Compile'"),
        (["--preset=fast", "--trainer.callbacks.Compile=auto"], r"--trainer\.callbacks\.Compile\.NAME"),
        (["--trainer.callbacks=[Timer, Timer]", "--trainer.callbacks.Timer.verbose=true"], "2 times"),
    ],
)
def test_wrong_options(ask, words, names):
    with pytest.raises(ValueError, match=names):
        ask({}, *words)


@pytest.mark.parametrize(
    ("capability", "preset"), [((7, 5), None), ((8, 0), "a100"), ((8, 9), "a100"), ((9, 0), "h100"), ((12, 0), "h100")]
)
def test_the_preset_of_a_gpu(monkeypatch, capability, preset):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert preset_of_device("auto")[0] == preset
    assert preset_of_device("cpu")[0] == "cpu"


def test_the_preset_of_another_machine():
    gpu = ("NVIDIA H100 80GB", (9, 0))
    assert preset_of_device("auto", gpu) == ("h100", "the device is NVIDIA H100 80GB")
    assert preset_of_device("cpu", gpu)[0] == "cpu"


def test_auto(ask, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert ask({"preset": "auto"}).preset == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert ask({"preset": "auto"}).preset is None
    assert ask({"preset": "auto", "trainer": {"accelerator": "cpu"}}).preset == "cpu"
