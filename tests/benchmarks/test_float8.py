import json
import sys

import pytest


@pytest.fixture
def float8(import_benchmark):
    return import_benchmark("float8")


@pytest.fixture
def run(run_benchmark, tmp_path):
    """Run the script at its tiny size, with a cache of its own."""

    def run(*words):
        return run_benchmark("float8", "--tiny", "--output", ".", *words, XDG_CACHE_HOME=str(tmp_path / "cache"))

    return run


def test_every_set_has_its_configurations(float8, tmp_path):
    names = [*float8._cases(tiny=True, output=tmp_path)]
    assert {name.split()[0] for name in names} == {"speed", "losses", "predict", "measure"}
    assert [name for name in names if name.startswith("losses bf16")] == [f"losses bf16 seed {i}" for i in range(3)]
    assert len([name for name in names if name.startswith("measure")]) == 15
    parts = [sum(holds(name) for holds in float8.SETS.values()) for name in names]
    assert parts == [1] * len(names), "each belongs to one set"
    assert [name for name in names if float8.SETS["compiler"](name)] == [
        "speed tensorwise tuned",
        "speed tensorwise combined",
    ]
    assert [name for name in names if float8.SETS["losses"](name)][-1] == "losses autocast seed 0"
    assert [name for name in names if float8.SETS["recipes"](name)] == [
        f"losses {name} seed 0" for name in float8.FLOAT8
    ]


def test_a_recipe_of_transformer_engine_may_have_a_format(float8):
    finer, own = (float8.precision(f"te current{more}", tiny=True) for more in (" e4m3", ""))
    assert (finer.recipe, finer.number_format) == ("current", "e4m3")
    assert (own.recipe, own.number_format) == ("current", None)


def test_hybrid_is_tensorwise_with_gradients_in_e5m2(float8):
    pytest.importorskip("torchao")
    hybrid, plain = (float8.precision(name, tiny=True) for name in (float8.HYBRID, "tensorwise"))
    assert (hybrid.recipe, hybrid.number_format) == ("tensorwise", "hybrid")
    assert (plain.recipe, plain.number_format) == ("tensorwise", "e4m3")


def test_what_compiles_beside_a_precision_is_allowed_there(float8):
    from lightning_ups.precision import BF16Precision, TEPrecision

    assert float8.precision("autocast", tiny=True).weights == "autocast"
    assert [c.scope for c in float8._compiled(BF16Precision(), compiled=True)] == ["model"]
    assert [c.scope for c in float8._compiled(TEPrecision(recipe="current"), compiled=True)] == ["blocks"]
    assert float8._compiled(TEPrecision(recipe="delayed"), compiled=True) == []
    assert float8._compiled(BF16Precision(), compiled=False) == []


def test_the_table_has_what_is_measured_so_far(float8):
    said = {"gain_all": 0.1, "gain_auto": 0.1}
    found = {f"predict_{model}": said for model in float8.MODELS}
    for name, step in {"bf16": 110.0, "tensorwise": 100.0, "auto": 101.0}.items():
        found[f"measure_1B_{name}"] = {"step_ms": step}
    found |= {"measure_150M_bf16": {"step_ms": 100.0}, "measure_150M_auto": {"step_ms": 100.0}}
    found |= {"measure_vit_bf16": {"step_ms": 100.0}, "measure_vit_tensorwise": {"step_ms": 125.0}}
    assert float8._predictions(found)[2:] == [
        "| 1B | +10.0% | +10.0% | +10.0% | +8.9% | True | -1.0% |",
        "| 150M | +10.0% |  | +10.0% | +0.0% | False |  |",
        "| vit | +10.0% | -20.0% | +10.0% |  | False |  |",
        "| mixed | +10.0% |  | +10.0% |  |  |  |",
        "| narrow | +10.0% |  | +10.0% |  |  |  |",
    ]


@pytest.mark.parametrize("setting", ["tuned", "combined"])
def test_a_setting_of_the_compiler_holds_while_it_runs(float8, monkeypatch, setting):
    from torch._inductor import config  # noqa: TID251

    names = ("coordinate_descent_tuning", "combo_kernels")
    seen = []

    def fit(*_, **__):
        seen.append([getattr(config, name) for name in names])
        return {"step_ms": 1.0}

    monkeypatch.setattr(float8, "_fit", fit)
    float8.speed("tensorwise", tiny=True, setting=setting)
    float8.speed("tensorwise", tiny=True)
    assert seen == [[setting == "tuned", setting == "combined"], [False, False]]


def test_what_is_finished_is_kept_when_a_run_is_cut_off(float8, tmp_path, monkeypatch, capsys):
    ran = []

    def finished(command, *, timeout, ranks, environment):
        if len(ran) == 2:
            raise float8.Interrupted("half of it")
        ran.append(command[command.index("--case") + 1])
        assert environment == {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        found = {"tokens_per_s": 1.0, "peak_gib": 1.0, "converted": 0, "losses": [1.0]}
        return f"epoch 0\nRESULT {json.dumps(found)}\n"

    monkeypatch.setattr(float8, "finished", finished)
    monkeypatch.setattr(sys, "argv", ["float8.py", "--tiny", "--set", "speed", "--output", str(tmp_path)])
    (tmp_path / "env.txt").write_text("command: of an earlier call\n")
    (tmp_path / "speed_tensorwise.failed").write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        float8.main()
    assert ran == ["speed bf16", "speed tensorwise"]
    kept = {"env.txt", "log.txt", "speed_bf16.json", "speed_tensorwise.json"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert (tmp_path / "log.txt").read_text().endswith("===== speed rowwise\nhalf of it\ninterrupted\n")
    assert (tmp_path / "env.txt").read_text().count("command: ") == 2
    assert "| precision | tokens/s |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "nonsense"], "No configuration of --set all has 'nonsense'"),
        (["--set", "measure-other"], "Nothing is predicted for vit yet"),
        (["--set", "recipes"], r"needs torchao, which cannot be loaded \(no CUDA\)\. Install"),
        (["--set", "predict-gpt"], "'predict 1B' needs torchao"),
        (["--set", "speed", "--output", "{file}"], "2"),
    ],
)
def test_what_cannot_run_is_said_before_anything_does(float8, tmp_path, monkeypatch, words, told):
    (tmp_path / "file").touch()
    words = [word.format(file=tmp_path / "file" / "below") for word in words]
    monkeypatch.setattr(sys, "argv", ["float8.py", "--tiny", "--output", str(tmp_path / "out"), *words])
    monkeypatch.setattr(float8, "unloadable", lacks("no CUDA" if "speed" not in words else None))
    monkeypatch.setattr(float8, "finished", None)
    with pytest.raises(SystemExit, match=told):
        float8.main()


def lacks(why, module=""):
    """Return an `unloadable` to which every package whose name has ``module`` in it cannot be loaded."""

    def unloadable(name, *, what, load=None):
        return (
            f"{what} needs {name.partition('.')[0]}, which cannot be loaded ({why})" if why and module in name else None
        )

    return unloadable


def test_transformer_engine_that_cannot_be_loaded_is_left_out(float8, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightning_ups._compat.optional.te._required", lambda _: 1 / 0)
    names = ["speed bf16", "speed tensorwise", "speed te delayed", "speed te block"]
    assert float8._possible(names, tiny=True, output=tmp_path) == names[:2]
    told = "'speed te delayed' needs transformer_engine, which cannot be loaded (ZeroDivisionError: division by zero)"
    assert capsys.readouterr().out == f"{told}: left out, with 1 others\n"
    with pytest.raises(SystemExit, match="Nothing is left to run"):
        float8._possible(names[2:], tiny=True, output=tmp_path)


def test_what_is_sharded_is_left_out_where_there_is_one_gpu(float8, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    names = ["losses bf16 seed 0", "losses 8B bf16 seed 0", "losses 8B tensorwise seed 0"]
    monkeypatch.setattr(float8, "unloadable", lacks(None))
    assert float8._possible(names, tiny=True, output=tmp_path) == names, "processes of a CPU share it"
    assert float8._possible(names, tiny=False, output=tmp_path) == names[:1]
    told = "'losses 8B bf16 seed 0' needs 2 GPUs, and this machine has 1: left out, with 1 others"
    assert told in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"Nothing is left to run\. Use a machine that has them"):
        float8._possible(names[1:], tiny=False, output=tmp_path)


def test_results_of_another_size_are_not_added_to(float8, tmp_path, monkeypatch):
    float8._keep(tmp_path / "speed_bf16.json", {"tokens_per_s": 1.0, "tiny": True, "device": "cpu"})
    monkeypatch.setattr(sys, "argv", ["float8.py", "--set", "speed", "--output", str(tmp_path)])
    monkeypatch.setattr(float8, "_summary", lambda _: [])
    with pytest.raises(SystemExit, match=r"speed_bf16.json in --output has tiny True, and this would have False"):
        float8.main()


def test_the_tables_follow_from_what_was_kept(float8, tmp_path):
    def keep(name, **result):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))

    for name, tokens in (("bf16", 100.0), ("tensorwise", 125.0)):
        keep(f"speed_{name}", tokens_per_s=tokens, peak_gib=3.5, converted=5, losses=[2.0, 1.0])
    for seed, loss in enumerate((1.0, 1.1, 1.2)):
        keep(f"losses_bf16_seed_{seed}", last_tenth=loss)
    keep("losses_rowwise_seed_0", last_tenth=1.15)
    keep("losses_tensorwise_seed_0", last_tenth=1.25)
    for seed, loss in enumerate((2.0, 2.1, 2.3)):
        keep(f"losses_8B_bf16_seed_{seed}", last_tenth=loss)
    keep("losses_8B_tensorwise_seed_1", last_tenth=2.15)
    keep("predict_1B", gain_all=0.20, gain_auto=0.22, verdict="")
    keep("predict_150M", gain_all=-0.05, gain_auto=0.0, verdict="leave bfloat16")
    for name, step in (("bf16", 120.0), ("tensorwise", 100.0), ("auto", 98.0)):
        keep(f"measure_1B_{name}", step_ms=step)
    text = "\n".join(float8._summary(tmp_path))
    assert "| tensorwise | 125 | 1.250 | 3.5 | 5 | 1.0000 |" in text
    assert "| bf16_seed_2 | 1.2000 | +0.0000 | True |" in text
    assert "| rowwise_seed_0 | 1.1500 | +0.1500 | True |" in text
    assert "| tensorwise_seed_0 | 1.2500 | +0.2500 | False |" in text
    assert "The band: 1.0000 to 1.2000" in text
    assert "| 8B_tensorwise_seed_1 | 2.1500 | +0.0500 | True |" in text
    assert "The band: 2.0000 to 2.3000" in text
    assert "| 1B | +20.0% | +20.0% | +22.0% | +22.4% | True | +2.0% |" in text
    assert "| 150M | -5.0% |  | +0.0% |" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["speed tensorwise", "losses rowwise seed 0", "losses 8B tensorwise seed 0", "predict vit"]
)
def test_a_configuration_runs_once_and_is_kept(run, tmp_path, case):
    done = run("--only", case)
    path = tmp_path / f"{case.replace(' ', '_')}.json"
    assert path.exists(), done.stdout + done.stderr
    assert (tmp_path / "env.txt").exists()
    again = run("--only", case)
    assert f"{case}: is there" in again.stdout


@pytest.mark.slow
def test_predictions_come_before_measuring(run, tmp_path):
    done = run("--set", "measure-other", "--only", "mixed")
    assert "Nothing is predicted for mixed yet" in done.stderr
    assert run("--set", "predict-other", "--only", "mixed").returncode == 0
    said = json.loads((tmp_path / "predict_mixed.json").read_text())
    assert 0 < len(said["converts"]) < said["of"]
    done = run("--set", "measure-other", "--only", "mixed")
    assert json.loads((tmp_path / "measure_mixed_auto.json").read_text())["converted"] == len(said["converts"])
    assert "| mixed |" in done.stdout
