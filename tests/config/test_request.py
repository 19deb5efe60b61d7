import pytest
import torch
import yaml
from lightning.pytorch import Callback

import lightning_ups.strategies  # noqa: F401  (so that its class names are known)
from lightning_ups.callbacks import AccelerationFlags
from lightning_ups.config import presets
from lightning_ups.config.request import ask, environment_layers, preset_of_device

SLOTS: dict[str, type[Callback]] = {"flags": AccelerationFlags}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(presets, "_FOLDER", tmp_path / "presets")
    (tmp_path / "presets").mkdir()
    for name, tree in PRESETS.items():
        (tmp_path / "presets" / f"{name}.yaml").write_text(f"# about {name}\n" + yaml.safe_dump(tree))
    return tmp_path


COMPILE = {"class_path": "lightning_ups.callbacks.Compile", "init_args": {"mode": "default"}}
PRESETS = {
    "fast": {"trainer": {"callbacks": [COMPILE], "max_epochs": 5}},
    "cpu": {"trainer": {"accelerator": "cpu"}},
    "a100": {"trainer": {"accelerator": "gpu"}},
    "h100": {"trainer": {"accelerator": "gpu"}},
}


def write(folder, tree, name="run.yaml"):
    (folder / name).write_text(yaml.safe_dump(tree))
    return name


def wanted(asked, name):
    return asked.texts[name].tree


def test_without_a_preset_all_stays(folder):
    run = write(folder, {"trainer": {"max_epochs": 1}})
    words = ["fit", "--config", run, "--trainer.devices=1", "--trainer.callbacks+=Compile"]
    asked = ask(words, slots=SLOTS)
    assert asked.words == words
    assert asked.texts == {}
    assert asked.preset is None
    assert [layer.name for layer in asked.given] == ["run.yaml", "the command line"]


@pytest.mark.parametrize("words", [["--preset", "fast"], ["--preset=fast"]])
def test_a_preset_lies_below(folder, words):
    run = write(folder, {"trainer": {"max_epochs": 1, "callbacks": ["EarlyStopping"]}})
    asked = ask(["fit", *words, "--config", run], slots=SLOTS)
    assert asked.words == ["fit", "--config", "preset fast", "--config", "run.yaml"]
    assert wanted(asked, "preset fast") == {"trainer": {"max_epochs": 5}}
    assert wanted(asked, "run.yaml")["trainer"]["callbacks"] == [COMPILE, "EarlyStopping"]
    assert asked.preset == "fast"
    assert asked.said == ["preset fast: about fast", "run.yaml:4: trainer.max_epochs 1 instead of 5"]


def test_a_preset_named_in_a_file(folder):
    run = write(folder, {"preset": "fast", "trainer": {}})
    asked = ask(["fit", "--config", run], slots=SLOTS)
    assert asked.preset == "fast"
    assert "preset" not in wanted(asked, "run.yaml")


def test_the_command_line_names_another(folder):
    run = write(folder, {"preset": "fast"})
    assert ask(["fit", "--config", run, "--preset", "cpu"], slots=SLOTS).preset == "cpu"
    assert ask(["fit", "--config", run, "--preset", "none"], slots=SLOTS).preset is None
    assert wanted(ask(["fit", "--config", run, "--preset", "none"], slots=SLOTS), "run.yaml") == {}


@pytest.mark.parametrize("words", [["run.yaml"], ["--trainer.devices", "1", "run.yaml"]])
def test_a_file_without_its_option(folder, words):
    with pytest.raises(ValueError, match=r"^'run\.yaml' belongs to no option.*Write --config run\.yaml\.$"):
        ask(["fit", *words], slots=SLOTS)


@pytest.mark.parametrize("words", [[], ["--config", "run.yaml"]])
def test_a_file_that_is_joined_to_its_option(folder, words):
    run = write(folder, {})
    with pytest.raises(ValueError, match=r"^'-c=run\.yaml' belongs to no option.*Write --config run\.yaml\.$"):
        ask(["fit", *words, f"-c={run}"], slots=SLOTS)


@pytest.mark.parametrize("preset", [[], ["--preset", "fast"]])
def test_a_callback_of_a_section_that_is_typed(folder, preset):
    words = ["--trainer.callbacks+=AccelerationFlags", "--trainer.callbacks.gc_interval", "3", "--trainer.devices=1"]
    moved = ["--flags.enabled=true", "--flags.gc_interval=3", "--trainer.devices=1"]
    assert [*ask(["fit", *preset, *words], slots=SLOTS).words][-3:] == moved
    others = ["--trainer.callbacks+=Timer", "--trainer.callbacks.verbose", "false"]
    assert [*ask(["fit", *words, *others], slots=SLOTS).words] == ["fit", *moved, *others]
    alone = ["--trainer.callbacks=AccelerationFlags", "--trainer.callbacks.help", "Timer"]
    assert [*ask(["fit", *alone], slots=SLOTS).words] == [
        "fit",
        "--trainer.callbacks=[]",
        "--flags.enabled=true",
        "--trainer.callbacks.help",
        "Timer",
    ]
    with pytest.raises(ValueError, match=r"^the command line: init_args is \[1\]\. It holds the settings of Acc"):
        ask(["fit", '--trainer.callbacks+={"class_path": "AccelerationFlags", "init_args": [1]}'], slots=SLOTS)


def test_a_section_with_nothing_below_it_is_absent(folder):
    run = write(folder, {"flags": None, "trainer": None})
    assert wanted(ask(["fit", "--config", run], slots=SLOTS), "run.yaml") == {}


def test_unknown(folder):
    with pytest.raises(ValueError, match=r"Did you mean 'fast'\?$"):
        ask(["fit", "--preset", "fasst"], slots=SLOTS)


@pytest.mark.parametrize("preset", ["none", "fast"])
@pytest.mark.parametrize("settings", [["mode"], [{"mode": "default"}], "mode"], ids=str)
@pytest.mark.parametrize("name", ["Compile", "AccelerationFlags"])
def test_settings_of_a_class_that_are_no_mapping(folder, preset, settings, name):
    run = write(folder, {"trainer": {"callbacks": [{"class_path": name, "init_args": settings}]}})
    with pytest.raises(ValueError, match=rf"^run\.yaml:\d+: init_args is .*the settings of {name},.*Write it as a map"):
        ask(["fit", "--config", run, "--preset", preset], slots=SLOTS)


def test_a_dictionary_of_the_users_may_have_such_a_key(folder):
    head = {"kind": "linear", "init_args": [1, 2]}
    run = write(folder, {"model": {"class_path": "M", "init_args": {"head": head}}})
    asked = ask(["fit", "--config", run, "--model.tail", '{"init_args": "xavier"}'], slots=SLOTS)
    file, typed = (layer.tree["model"]["init_args"] for layer in asked.given)
    assert (file["head"], typed["tail"]) == (head, {"init_args": "xavier"})


@pytest.mark.parametrize("value", [["fast", "cpu"], True, {"name": "fast"}], ids=str)
def test_a_preset_that_is_no_name(folder, value):
    run = write(folder, {"trainer": {}, "preset": value})
    with pytest.raises(ValueError, match=r"^run\.yaml:1: preset is .*Give one name; `presets` lists them\.$"):
        ask(["fit", "--config", run], slots=SLOTS)


@pytest.mark.parametrize("words", [["--preset"], ["--preset", "--config", "run.yaml"], ["--preset="]])
def test_an_option_that_lacks_its_preset(folder, words):
    run = write(folder, {"preset": "fast"})
    with pytest.raises(ValueError, match=r"^the command line: preset is ''\."):
        ask(["fit", "--config", run, *words], slots=SLOTS)


def test_lists_of_the_command_line_are_merged(folder):
    words = ["--trainer.callbacks+=Compile", "--trainer.callbacks.mode=max-autotune", "--trainer.devices=1"]
    asked = ask(["fit", "--preset", "fast", *words], slots=SLOTS)
    assert asked.words == ["fit", "--config", "preset fast", "--trainer.devices=1", "--config", "the command line"]
    (compile_,) = wanted(asked, "the command line")["trainer"]["callbacks+"]
    assert compile_ == {"class_path": "Compile", "init_args": {"mode": "max-autotune"}}
    assert wanted(asked, "preset fast") == {"trainer": {"max_epochs": 5}}
    assert asked.said[1:] == ["the command line: Compile.mode max-autotune instead of default"]


def test_a_list_replaced_by_the_command_line_keeps_the_presets(folder):
    asked = ask(["fit", "--preset", "fast", "--trainer.callbacks=LearningRateMonitor"], slots=SLOTS)
    assert wanted(asked, "the command line")["trainer"]["callbacks"] == [COMPILE, "LearningRateMonitor"]


def test_a_precision_of_the_command_line_is_the_users(folder):
    (folder / "presets" / "fast.yaml").write_text(
        "# x\n" + yaml.safe_dump({"trainer": {"plugins": ["lightning_ups.precision.BF16Precision"]}})
    )
    asked = ask(["fit", "--preset", "fast", "--trainer.precision", "32-true"], slots=SLOTS)
    assert wanted(asked, "preset fast") == {"trainer": {}}
    assert asked.words[-2:] == ["--trainer.precision", "32-true"]
    assert asked.said[1:] == ["the command line: precision 32-true instead of BF16Precision"]


@pytest.mark.parametrize(("key", "listed"), [("trainer.callbacks+", ["Compile", "Timer"]), ("trainer.callbacks-", [])])
def test_lists_with_dots_in_their_keys_are_merged_too(folder, key, listed):
    name = "Timer" if key.endswith("+") else "Compile"
    asked = ask(["fit", "--preset", "fast", "--config", write(folder, {key: [name]})], slots=SLOTS)
    assert wanted(asked, "run.yaml").get(key) is None
    trainers = [wanted(asked, file)["trainer"] for file in ("preset fast", "run.yaml")]
    found = [item for trainer in trainers for each in ("callbacks", "callbacks+") for item in trainer.get(each, [])]
    assert [item if isinstance(item, str) else item["class_path"].rpartition(".")[2] for item in found] == listed


def test_removal_needs_a_preset(folder):
    run = write(folder, {"trainer": {"callbacks-": ["Compile"]}})
    with pytest.raises(ValueError, match=r"^run.yaml:2: callbacks- is given without a preset.*--preset NAME\.$"):
        ask(["fit", "--config", run], slots=SLOTS)
    asked = ask(["fit", "--config", run, "--preset", "fast"], slots=SLOTS)
    assert "callbacks" not in wanted(asked, "preset fast")["trainer"]
    assert wanted(asked, "run.yaml") == {"trainer": {}}


def test_a_slot_switched_off(folder):
    asked = ask(["fit", "--config", write(folder, {"flags": False})], slots=SLOTS)
    assert wanted(asked, "run.yaml") == {"flags": {"enabled": False}}


def test_a_slot_switched_off_on_the_command_line(folder):
    assert ask(["fit", "--flags", "false"], slots=SLOTS).words == ["fit", "--flags.enabled=false"]
    assert ask(["fit", "--flags=true"], slots=SLOTS).words == ["fit", "--flags.enabled=true"]
    assert ask(["fit", "--flags.tf32", "false"], slots=SLOTS).words == ["fit", "--flags.tf32", "false"]


def test_a_callback_of_a_slot_goes_into_its_slot(folder):
    spec = {"class_path": "AccelerationFlags", "init_args": {"tf32": True}}
    run = write(folder, {"trainer": {"callbacks": ["EarlyStopping", spec]}, "flags": {"gc_interval": 3}})
    asked = ask(["fit", "--config", run], slots=SLOTS)
    assert wanted(asked, "run.yaml") == {
        "trainer": {"callbacks": ["EarlyStopping"]},
        "flags": {"tf32": True, "gc_interval": 3},
    }


def test_a_strategy_by_the_name_of_its_class(folder):
    asked = ask(["fit", "--config", write(folder, {"trainer": {"strategy": "FSDP2Strategy"}})], slots=SLOTS)
    assert wanted(asked, "run.yaml") == {"trainer": {"strategy": {"class_path": "FSDP2Strategy"}}}
    asked = ask(["fit", "--trainer.strategy", "FSDP2Strategy"], slots=SLOTS)
    assert asked.words == ["fit", '--trainer.strategy={"class_path": "FSDP2Strategy"}']
    assert ask(["fit", "--trainer.strategy", "fsdp2"], slots=SLOTS).words == ["fit", "--trainer.strategy", "fsdp2"]


def test_settings_that_are_all_commented_out(folder):
    tree = {
        "model": {"class_path": "M", "init_args": None},
        "trainer": {"callbacks": [{"class_path": "C", "init_args": None}]},
    }
    asked = ask(["fit", "--config", write(folder, tree)], slots=SLOTS)
    assert wanted(asked, "run.yaml") == {"model": {"class_path": "M"}, "trainer": {"callbacks": [{"class_path": "C"}]}}


def test_what_is_typed_comes_after_the_files(folder):
    first, second = write(folder, {}, "1.yaml"), write(folder, {}, "2.yaml")
    asked = ask(["fit", "--model.width=3", f"--config={first}", "stray", "--config", second], slots=SLOTS)
    assert asked.words == ["fit", "--config", "1.yaml", "--config", "2.yaml", "--model.width=3", "stray"]


def test_a_section_of_a_file_is_taken_out(folder):
    run = write(folder, {"fit": {"trainer": {"max_epochs": 1}}, "test": {}})
    assert wanted(ask(["fit", "--config", run], slots=SLOTS), "run.yaml") == {"trainer": {"max_epochs": 1}}


def test_a_short_option_for_files(folder):
    run = write(folder, {"preset": "cpu"})
    assert ask(["fit", "-c", run], slots=SLOTS).preset == "cpu"


def gpu(monkeypatch, name, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(
    ("name", "capability", "preset"),
    [
        ("NVIDIA H200", (9, 0), "h100"),
        ("NVIDIA B200", (10, 0), "h100"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("NVIDIA L4", (8, 9), "a100"),
        ("Tesla T4", (7, 5), None),
    ],
)
def test_the_preset_of_a_gpu(monkeypatch, name, capability, preset):
    gpu(monkeypatch, name, capability)
    found, why = preset_of_device("auto")
    assert found == preset
    assert name in why
    assert preset_of_device("cpu") == ("cpu", "the run is on the CPU")


def test_the_preset_of_a_cpu(monkeypatch):
    gpu(monkeypatch, None, None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert preset_of_device("auto")[0] == "cpu"


def test_auto_says_what_it_chose(folder, monkeypatch):
    gpu(monkeypatch, "NVIDIA A100", (8, 0))
    run = write(folder, {"preset": "auto"})
    asked = ask(["fit", "--config", run], slots=SLOTS)
    assert (asked.preset, asked.said[0]) == ("a100", "preset auto: a100, since the device is NVIDIA A100")
    asked = ask(["fit", "--config", run, "--trainer.accelerator=cpu"], slots=SLOTS)
    assert asked.preset == "cpu"


def test_auto_may_fit_nothing(folder, monkeypatch):
    gpu(monkeypatch, "Tesla T4", (7, 5))
    asked = ask(["fit", "--config", write(folder, {"preset": "auto", "trainer": {}})], slots=SLOTS)
    assert asked.preset is None
    assert asked.said == [
        "preset auto: none, since Tesla T4 has no bfloat16 (compute capability 7.5); Lightning's defaults stay"
    ]
    assert wanted(asked, "run.yaml") == {"trainer": {}}


# The environment


def test_each_variable_that_is_set_is_a_layer(folder, monkeypatch):
    write(folder, {"trainer": {"max_steps": 1}})
    monkeypatch.setenv("PL_CONFIG", "run.yaml")
    monkeypatch.setenv("PL_TRAINER__MAX_STEPS", "2")
    monkeypatch.setenv("PL_MODEL", "{class_path: mine.Net}")
    keys = ("config", "trainer.max_steps", "trainer.max_epochs", "model")
    variables = {key: f"PL_{key.replace('.', '__').upper()}" for key in keys}
    layers = {layer.name: layer for layer in environment_layers(variables, command="fit")}
    assert {name: layer.tree for name, layer in layers.items()} == {
        "PL_CONFIG: run.yaml": {"trainer": {"max_steps": 1}},
        "PL_TRAINER__MAX_STEPS": {"trainer": {"max_steps": "2"}},
        "PL_MODEL": {"model": {"class_path": "mine.Net"}},
    }
    assert layers["PL_CONFIG: run.yaml"].place("trainer", "max_steps") == "PL_CONFIG: run.yaml:2"
