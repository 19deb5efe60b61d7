import pytest
import yaml
from jsonargparse import get_loader

from lightning_ups.config.layers import Layer, addressed, items, option_layer, options, preset_layer, read

CLASSES = ("model", "trainer.strategy")


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="run.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return name

    return write


def test_each_value_has_a_place(write):
    layer = read(write("trainer:\n  callbacks:\n    - class_path: A\n      init_args: {x: 1}\n"), command="fit")
    assert layer.place("trainer") == "run.yaml:1"
    assert layer.place("trainer", "callbacks", 0, "init_args", "x") == "run.yaml:4"
    assert layer.place("trainer", "callbacks", 0, "nowhere") == "run.yaml:3"
    assert layer.place("nowhere") == "run.yaml"


def test_a_section_for_the_command(write):
    layer = read(write("fit:\n  trainer:\n    max_epochs: 1\ntest:\n  trainer: {}\n"), command="fit")
    assert layer.tree == {"trainer": {"max_epochs": 1}}
    assert layer.place("trainer", "max_epochs") == "run.yaml:3"


def test_a_section_in_a_file_of_its_own(write):
    write("max_epochs: 3\n", "parts/trainer.yaml")
    assert read(write("trainer: trainer.yaml\n", "parts/run.yaml"), command="fit").tree == {
        "trainer": {"max_epochs": 3}
    }


def test_lists_with_dots_in_their_keys(write):
    layer = read(write("trainer.callbacks+: [Timer]\ntrainer:\n  max_steps: 3\ntrainer.max_epochs: 1\n"), command="fit")
    assert layer.tree == {"trainer": {"max_steps": 3, "callbacks+": ["Timer"]}, "trainer.max_epochs": 1}
    assert not layer.whole
    assert layer.place("trainer", "callbacks+").endswith(":1")


def test_a_list_that_is_given_in_both_ways_is_an_error(write):
    with pytest.raises(ValueError, match=r"'trainer.callbacks' twice.*Keep one of them\.$"):
        read(write("trainer.callbacks: [A]\ntrainer:\n  callbacks: [B]\n"), command="fit")
    shape = {"trainer.callbacks": ["A"], "trainer": ["B"]}
    assert read(write(str(shape)), command="fit").tree == shape, "which is told as any other"


def test_yaml_in_place_of_a_file():
    assert read("{trainer: {max_epochs: 1}}", command="fit").tree == {"trainer": {"max_epochs": 1}}


def test_no_such_file(write):
    write("", "run.yaml")
    with pytest.raises(FileNotFoundError, match=r"There is no file 'rum.yaml'.*Did you mean 'run.yaml'\?$"):
        read("rum.yaml", command="fit")
    with pytest.raises(FileNotFoundError, match=r"Check the path\.$"):
        read("nowhere/run.yaml", command="fit")


def test_no_yaml(write):
    with pytest.raises(ValueError, match=r"^run.yaml:3:1: this is no YAML: .*a wrong indent\.$"):
        read(write("trainer:\n  callbacks: [\n"), command="fit")


def test_text_that_is_not_utf_8(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_bytes("# gr\u00f6\u00dfer\ntrainer: {}\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"^run\.yaml is no text in UTF-8: .* at byte 4\..*Save it as UTF-8\.$"):
        read("run.yaml", command="fit")


def test_no_settings(write):
    with pytest.raises(ValueError, match=r"^run.yaml holds no settings, but 'hello'.*--print_config\.$"):
        read(write("hello"), command="fit")
    with pytest.raises(ValueError, match=r"^run.yaml is empty\. A configuration is a YAML mapping"):
        read(write("# all commented out\n"), command="fit")


@pytest.mark.parametrize("named", ["other.yaml", "[other.yaml]", "{}", "3"])
@pytest.mark.parametrize("section", ["", "fit: "])
def test_a_configuration_that_names_another(write, named, section):
    path = write(f"{section}{{seed_everything: 1,\n config: {named}}}\n")
    with pytest.raises(
        ValueError, match=r"run\.yaml:2: 'config' is .* would be passed over\. Give both on the command"
    ):
        read(path, command="fit")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("base: &b\n  config: x.yaml\n<<: *b\n", "run.yaml: "),
        ("base: &b\n  config: x.yaml\nfit:\n  <<: *b\n", "run.yaml: "),
        ("config: x.yaml\nfit: {trainer: {}}\n", "run.yaml:1: "),
    ],
)
def test_a_configuration_that_names_another_from_elsewhere(write, text, place):
    with pytest.raises(ValueError, match=rf"^{place}'config' is 'x.yaml'\..* --config x\.yaml --config run\.yaml$"):
        read(write(text), command="fit")


def test_lists_with_a_dot_may_be_merged_from_elsewhere(write):
    tree = read(write("base: &b\n  trainer.callbacks+: [Compile]\n<<: *b\n"), command="fit").tree
    assert tree["trainer"] == {"callbacks+": ["Compile"]}


@pytest.mark.parametrize("named", ["null", "[]"])
def test_a_configuration_that_could_have_named_another(write, named):
    assert read(write(f"seed_everything: 1\nconfig: {named}\n"), command="fit").tree["seed_everything"] == 1


def test_a_key_given_twice(write):
    with pytest.raises(ValueError, match=r"^run.yaml:4: trainer.max_epochs is given twice, on line 2 too.*Keep one\.$"):
        read(write("trainer:\n  max_epochs: 1\n  min_epochs: 1\n  max_epochs: 2\n"), command="fit")


def test_anchors_and_merges_are_no_repetition(write):
    layer = read(write("a: &a {x: 1}\nb: {<<: *a, y: 2}\n"), command="fit")
    assert layer.tree["b"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    "value", ["1e-3", 0.001, "true", True, None, "null", "3", 3, "a: b", float("inf"), [1, "x"], {}]
)
def test_the_text_says_what_the_tree_says(value):
    tree = {"key": value}
    assert get_loader("yaml")(Layer(name="", tree=tree).text) == tree


def test_the_layer_of_a_preset():
    layer = preset_layer("cpu")
    assert layer.name == "preset cpu"
    assert layer.tree["trainer"]["accelerator"] == "cpu"


def test_items():
    assert items(None) == []
    assert items("A") == ["A"]
    assert items(["A", "B"]) == ["A", "B"]
    assert items({"class_path": "A"}) == [{"class_path": "A"}]


def test_options():
    words = ["--a=1", "--b", "2", "--flag", "--c", "--d=x=y", "stray"]
    assert [(key, value) for key, value, _ in options(words)] == [
        ("a", "1"),
        ("b", "2"),
        ("flag", ""),
        ("c", ""),
        ("d", "x=y"),
        ("", ""),
    ]
    assert [word for _, _, spelled in options(words) for word in spelled] == words


@pytest.mark.parametrize("text", ["[1", "{a: b"])
def test_a_value_in_brackets_that_are_not_closed_is_text(text):
    layer, _ = option_layer(["--model.title", text, "--trainer.callbacks", text], classes=CLASSES)
    assert layer.tree == {"model": {"init_args": {"title": text}}, "trainer": {"callbacks": [text]}}


def test_a_negative_number_is_a_value():
    assert [(key, value) for key, value, _ in options(["--a", "-1", "--b"])] == [("a", "-1"), ("b", "")]


def test_options_as_a_tree():
    layer, spared = option_layer(
        ["--trainer.max_epochs=3", "--model", "mine.M", "--model.width", "4", "--model.init_args.act=relu"],
        classes=CLASSES,
    )
    assert layer.tree == {
        "trainer": {"max_epochs": "3"},
        "model": {"class_path": "mine.M", "init_args": {"width": "4", "act": "relu"}},
    }
    assert spared == [
        "--trainer.max_epochs=3",
        "--model",
        "mine.M",
        "--model.width",
        "4",
        "--model.init_args.act=relu",
    ]


def test_options_about_lists():
    words = [
        "--trainer.callbacks=A",
        "--trainer.callbacks.x=1",
        "--trainer.callbacks+=B",
        "--trainer.callbacks.y",
        "[2]",
    ]
    layer, spared = option_layer([*words, "--trainer.plugins+=P", "--trainer.callbacks.help=A"], classes=CLASSES)
    assert layer.tree["trainer"] == {
        "callbacks": [{"class_path": "A", "init_args": {"x": "1"}}],
        "callbacks+": [{"class_path": "B", "init_args": {"y": [2]}}],
        "plugins+": ["P"],
    }
    assert spared == ["--trainer.callbacks.help=A"]


def test_an_option_that_empties_a_list():
    layer, spared = option_layer(["--trainer.callbacks=null"], classes=())
    assert layer.tree == {"trainer": {"callbacks": []}}
    assert spared == []


def test_an_option_about_an_element_of_a_file_stays():
    layer, spared = option_layer(["--trainer.callbacks.x=1"], classes=CLASSES)
    assert layer.tree == {}
    assert spared == ["--trainer.callbacks.x=1"]


def test_yaml_in_an_option():
    layer, _ = option_layer(['--trainer.callbacks=[{"class_path": "A"}, B]'], classes=CLASSES)
    assert layer.tree["trainer"]["callbacks"] == [{"class_path": "A"}, "B"]


def test_the_tree_is_plain_yaml(write):
    layer = read(write("trainer: {max_epochs: 1}\nmodel: {class_path: M}\n"), command="fit")
    assert yaml.safe_load(layer.text) == layer.tree


def listed(*trainers, preset=None):
    layers = [Layer(name=f"{number}.yaml", tree={"trainer": trainer}) for number, trainer in enumerate(trainers)]
    return layers, None if preset is None else Layer(name="preset fast", tree={"trainer": preset})


def test_an_option_changes_what_a_layer_lists():
    spec = {"class_path": "her.EMA", "init_args": {"decay": 0.9}}
    layers, _ = listed({"callbacks": [spec, "Compile"]}, {"callbacks+": "ActivationCheckpoint"})
    words = ["--trainer.callbacks.EMA.decay", "0.5", "--x=1", "--trainer.callbacks.ActivationCheckpoint.save=nothing"]
    left, changed = addressed(words, layers, preset=None)
    assert left == ["--x=1"]
    assert changed[0].tree["trainer"]["callbacks"] == [{**spec, "init_args": {"decay": "0.5"}}, "Compile"]
    assert changed[1].tree["trainer"]["callbacks+"] == [
        {"class_path": "ActivationCheckpoint", "init_args": {"save": "nothing"}}
    ]
    assert not changed[0].whole
    assert layers[0].tree["trainer"]["callbacks"][0] is spec
    assert spec["init_args"] == {"decay": 0.9}


def test_an_option_reaches_what_stands():
    layers, _ = listed({"callbacks": ["Compile"]}, {"callbacks": ["EMA"]})
    with pytest.raises(ValueError, match=r"no Compile is listed in trainer\.callbacks"):
        addressed(["--trainer.callbacks.Compile.mode=default"], layers, preset=None)


def test_an_option_goes_over_what_the_preset_lists():
    layers, preset = listed({"max_epochs": 1}, preset={"callbacks": ["lightning_ups.callbacks.Compile"]})
    words = ["--trainer.callbacks.Compile.mode=default", "--trainer.callbacks.Compile.scope", "model"]
    left, changed = addressed(words, layers, preset=preset)
    assert left == [
        "--trainer.callbacks+=Compile",
        "--trainer.callbacks.mode=default",
        "--trainer.callbacks.scope=model",
    ]
    assert changed[0].tree == layers[0].tree


def test_other_options_stay():
    layers, _ = listed({"callbacks": ["Compile"]})
    words = [
        "--trainer.callbacks.init_args.mode=default",
        "--trainer.callbacks.mode=x",
        "--trainer.callbacks.help=Compile",
    ]
    words += ["--trainer.callbacks+=EMA", "--model.net.Compile.mode=1", "word"]
    assert addressed(words, layers, preset=None).words == words


def test_an_option_about_a_class_that_is_typed_before_it():
    layers, _ = listed({"callbacks": ["Compile"]})
    words = ["--trainer.callbacks+=ModelCheckpoint", "--x=1", "--trainer.callbacks+", '{"class_path": "her.EMA"}']
    of_the_first = ["--trainer.callbacks.ModelCheckpoint.save_top_k", "2"]
    of_the_last = ["--trainer.callbacks.EMA.decay=0.5"]
    assert addressed([*words, *of_the_first, *of_the_last], layers, preset=None).words == [
        *words[:2],
        "--trainer.callbacks.save_top_k=2",
        *words[2:],
        "--trainer.callbacks.decay=0.5",
    ]
    with pytest.raises(ValueError, match="no ModelCheckpoint is listed"):
        addressed([*of_the_first, *words], layers, preset=None)
    # Of one that a file lists as well, the file's; of one that replaces the file's, that one.
    mode = "--trainer.callbacks.Compile.mode=default"
    assert addressed(["--trainer.callbacks+=Compile", mode], layers, preset=None).words == [
        "--trainer.callbacks+=Compile"
    ]
    words = ["--trainer.callbacks=Compile", "--trainer.callbacks.mode=default"]
    assert addressed([words[0], mode], layers, preset=None).words == words


@pytest.mark.parametrize(
    ("listed_", "cure"),
    [
        (["Compile", "Compile"], r"Change it in 0\.yaml\.$"),
        (["Compil"], r"Did you mean 'Compil'\?$"),
        ([], r"Add one by --trainer\.callbacks\+=Compile --trainer\.callbacks\.mode VALUE\.$"),
    ],
)
def test_an_option_about_none_or_two(listed_, cure):
    layers, _ = listed({"callbacks": listed_})
    with pytest.raises(ValueError, match=cure):
        addressed(["--trainer.callbacks.Compile.mode=default"], layers, preset=None)


def test_an_option_that_names_a_class_and_no_setting():
    layers, preset = listed({"max_epochs": 1}, preset={"callbacks": ["lightning_ups.callbacks.Compile"]})
    with pytest.raises(ValueError, match=r"Compile is a class, .* --trainer\.callbacks-=Compile"):
        addressed(["--trainer.callbacks.Compile=false"], layers, preset=preset)
    words = ["--trainer.callbacks.T_max=3"]  # a setting of the last one that is typed
    assert addressed(words, layers, preset=preset).words == words
