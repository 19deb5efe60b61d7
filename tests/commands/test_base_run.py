import importlib
import sys
from argparse import ArgumentParser

import pytest
import yaml

from lightning_ups.cli import _RequestedRunCLI
from lightning_ups.commands import base_run
from lightning_ups.commands.base_run import (
    _own_modules,
    accelerator_of_preset,
    add_common_options,
    base_of,
    parsed,
    parts_of_preset,
    store_of,
    write_new,
)
from lightning_ups.insight.tune import Result


def parse(words):
    return _RequestedRunCLI(args=["fit", *words]).requested


def base(*words, **settings):
    tree = {"model": {"class_path": "tests.cli_toys.Toy", "init_args": {"width": 16}}, **settings}
    return base_of(parse, ["--config", yaml.safe_dump(tree), *words])


def names(found):
    return [part.name for part in parts_of_preset(found)]


def test_the_parts_of_a_preset_are_those_that_the_user_does_not_set():
    found = base("--preset", "h100")
    assert (found.preset, "--preset" in found.words) == ("h100", False)
    flags = ["flags.tf32", "flags.expandable_segments", "flags.attention"]
    assert names(found) == ["BF16Precision", "Compile", *flags]
    assert accelerator_of_preset(found) == {"trainer": {"accelerator": "gpu"}}
    found = base(
        "--preset=h100",
        trainer={"precision": "32-true", "accelerator": "cpu", "callbacks": ["Compile"]},
        flags={"tf32": False},
    )
    assert names(found) == flags[1:]
    assert accelerator_of_preset(found) == {}
    assert names(base(trainer={"accelerator": "cpu"})) == []


def test_explicit_settings_are_those_of_files_and_options():
    found = base(
        "--model.act=relu",
        "--trainer.callbacks+=ActivationOffload",
        data={"class_path": "tests.cli_toys.Data", "init_args": {"size": 4}},
        trainer={"accelerator": "cpu", "callbacks": ["Compile"]},
    )
    assert {
        "model": "tests.cli_toys.Toy",
        "model.width": 16,
        "model.act": "relu",
        "data.size": 4,
        "trainer.accelerator": "cpu",
        "callbacks.Compile": "Compile",
    }.items() <= found.explicit.items()
    assert "callbacks.ActivationOffload" in found.explicit
    assert not found.sets_precision
    assert base(trainer={"accelerator": "cpu", "plugins": ["BF16Precision"]}).sets_precision


def test_what_a_result_depends_on():
    one = base(trainer={"accelerator": "cpu"})
    assert base(trainer={"accelerator": "cpu"}).identity == one.identity
    assert base("--model.width=32", trainer={"accelerator": "cpu"}).identity["model"] != one.identity["model"]
    assert base(trainer={"accelerator": "cpu", "max_steps": 5}).identity["files"] != one.identity["files"]
    assert one.configuration("x: 1", preset=None).all_words[-4:] == ["--preset", "none", "--config", "x: 1\n"]


def test_several_nodes_are_refused():
    with pytest.raises(ValueError, match="num_nodes is 2"):
        base("--trainer.num_nodes=2", trainer={"accelerator": "cpu"}).devices(None)
    assert base("--trainer.devices=2", trainer={"accelerator": "cpu"}).devices(None) == ([], 2)


def test_files_are_never_overwritten(tmp_path):
    paths = [write_new(tmp_path / "ablate", ".json", text) for text in "ab"]
    assert [path.name for path in paths] == ["ablate.json", "ablate-2.json"]
    assert [path.read_text() for path in paths] == ["a", "b"]


def test_options_of_both_commands(tmp_path):
    parser = ArgumentParser()
    add_common_options(parser, seconds=7, output="x")
    found = parser.parse_args([])
    assert (found.seconds, found.limit, str(found.output), found.fresh) == (7, 300, "x", False)
    store_of(tmp_path, fresh=True).add("a", Result(), about={})
    assert store_of(tmp_path, fresh=True).find("a") is None
    assert store_of(tmp_path, fresh=False).find("a") is not None
    assert store_of(tmp_path, fresh=False).path.parent == tmp_path


def test_what_changes_times_is_part_of_the_identity(monkeypatch, tmp_path):
    data = {"class_path": "tests.cli_toys.Data"}

    def found(*words):
        return base(*words, data=data, trainer={"accelerator": "cpu"}).identity

    before = found()
    for name in ("OMP_NUM_THREADS", "TORCH_NCCL_X", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", "RAYON_NUM_THREADS"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "77")
            assert found() != before, name
    with monkeypatch.context() as changed:
        changed.setenv("SLURM_JOB_ID", "7")
        assert found() == before, "an interrupted search continues in another job"
    with monkeypatch.context() as changed:
        changed.setattr("torch.get_num_threads", lambda: 77)
        assert found() != before
    assert found("--data.size=16")["data"] != before["data"]
    monkeypatch.chdir(tmp_path)
    assert found() != before, "relative paths"


def test_a_module_that_the_users_file_imports_is_part_of_the_identity(monkeypatch, tmp_path):
    (tmp_path / "project").mkdir()
    helper = tmp_path / "project" / "a_helper_of_the_user.py"
    helper.write_text("WIDTH = 1\n")
    (tmp_path / "project" / "run.yaml").write_text("seed_everything: 1\n")
    monkeypatch.syspath_prepend(str(helper.parent))
    monkeypatch.setitem(sys.modules, helper.stem, importlib.import_module(helper.stem))
    monkeypatch.chdir(tmp_path)
    words = ["--config", "project/run.yaml"]
    before = _own_modules(words)
    assert before == [str(helper)]
    monkeypatch.chdir(helper.parent)
    assert _own_modules([]) == before
    source = base(trainer={"accelerator": "cpu"}).identity["source"]
    helper.write_text("WIDTH = 2\n")
    assert base(trainer={"accelerator": "cpu"}).identity["source"] != source


@pytest.mark.parametrize("name", ["minutes", "seconds", "limit", "rounds", "devices"])
@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_numbers_must_be_positive(name, value):
    parser = ArgumentParser()
    if value == "nan" and name in ("rounds", "devices"):
        pytest.skip("argparse refuses it")
    kind = int if name in ("rounds", "devices") else float
    parser.add_argument(f"--{name}", type=kind, default=None if name == "devices" else 5)
    with pytest.raises(ValueError, match=f"^--{name} {value} is not a positive number"):
        parsed(parser, [f"--{name}={value}"])
    assert parsed(parser, ["--x"])[1] == ["--x"]


def test_an_output_that_cannot_be_written_is_refused_before_a_trial(tmp_path, capsys, monkeypatch):
    parser = ArgumentParser()
    add_common_options(parser, seconds=7, output="x")
    parsed(parser, ["--output", str(tmp_path / "name")])
    assert [*tmp_path.iterdir()] == []
    parsed(parser, ["--output", str(tmp_path / "new" / "name")])
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^--output .*file/name cannot be written: Not a directory"):
        parsed(parser, ["--output", str(tmp_path / "file" / "name")])
    with pytest.raises(ValueError, match=r"^--store .*file.* cannot be written"):
        store_of(tmp_path / "file", fresh=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert store_of(None, fresh=False) is None
    assert "not kept" in capsys.readouterr().err


@pytest.mark.parametrize("form", [[2, 3], "2,3"])
def test_gpus_that_the_run_names_are_those_of_its_trials(monkeypatch, form):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "a GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,MIG-d")
    found = base(trainer={"accelerator": "cuda", "devices": form})
    assert found.devices(None) == (["GPU-c", "MIG-d"], 2)
    assert found.devices(4) == (["GPU-c", "MIG-d", "GPU-a", "GPU-b"], 2)
    words = found.configuration("flags: {tf32: true}", preset=None).all_words
    requested = parse(words)
    assert requested.run.num_devices == 2
    found = base(trainer={"accelerator": "cuda", "devices": 2})
    assert found.devices(None) == (["GPU-a", "GPU-b"], 2)
    assert "--trainer.devices" not in found.configuration(preset=None).words


def test_a_given_option_for_devices_gives_way_in_trials(monkeypatch):
    found = base("--trainer.devices=[3]", trainer={"accelerator": "cpu"})
    assert parse(found.configuration(preset=None).all_words).run.num_devices == 1
    assert found.typed == ["trainer.devices"]


@pytest.mark.parametrize(
    ("cores", "workers", "per_trial", "count"),
    [(64, 4, 1, 8), (16, 4, 1, 3), (8, 0, 1, 4), (4, 8, 1, 1), (16, 3, 4, 4)],
)
def test_trials_at_once_have_cores_of_their_own(monkeypatch, cores, workers, per_trial, count):
    monkeypatch.setattr(base_run, "usable_cores", lambda: cores)
    names = [str(index) for index in range(8)]
    assert len(base_run.undisturbed(names, per_trial, workers=workers)) == count


def test_the_number_of_a_gpu_and_the_place_of_caches_change_no_result(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    before = base_run._variables()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    assert base_run._variables() == before
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert base_run._variables() != before
