import json

import pytest


def test_the_report_has_cold_and_warm_beside_each_other(import_benchmark):
    cold = {"line": "nn_mlp", "side": "preset", "kind": "cold", "first_step_s": 20.5}
    cold["caches"] = {"aot_autograd": {}, "inductor": {"fxgraph_cache_miss": 2}}
    warm = {**cold, "kind": "warm", "first_step_s": 2.5, "caches": {"inductor": {"fxgraph_cache_hit": 2}}}
    failed = {"line": "llama", "side": "preset", "kind": "cold", "error": "no"}
    text = import_benchmark("startup").report([cold, failed, warm])
    assert text.splitlines()[2:] == ["| nn_mlp | preset | 20.5 | 2.5 | 2 | 0 |", "| llama | preset |  |  | 0 |  |"]


@pytest.mark.slow
def test_a_warm_start_compiles_nothing(run_benchmark, tmp_path):
    done = run_benchmark("startup", "--tiny", "--only", "nn_mlp", "--sides", "stock_compile", OMP_NUM_THREADS="1")
    records = [json.loads(line) for line in (tmp_path / "startup.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["cold", "warm"], done.stdout + done.stderr
    missed = [record["caches"]["inductor"].get("fxgraph_cache_miss", 0) for record in records]
    assert missed[0] > missed[1] == 0
    assert "| nn_mlp | stock_compile |" in done.stdout


def test_unknown_lines_are_refused(import_benchmark, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["startup.py", "--only", "no_such_line"])
    with pytest.raises(SystemExit):
        import_benchmark("startup").main()
    assert "there is no line no_such_line" in capsys.readouterr().err
