def test_kernels_are_kept_by_their_start(import_benchmark):
    def event(name, stream, start, kind="kernel"):
        return {"cat": kind, "name": name, "ts": start, "dur": 2.0, "args": {"stream": stream}}

    host = {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9}
    trace = [event("nccl", 20, 15.5), host, event("mm", 7, 12), event("copy", 7, 10, "gpu_memcpy")]
    kept = import_benchmark("timeline").kernels(trace)
    assert kept == [("copy", 7, 0, 2), ("mm", 7, 2, 2), ("nccl", 20, 5.5, 2)]


def test_a_side_waits_until_all_are_compiled_and_those_before_are_timed(import_benchmark, tmp_path):
    await_turn, sides = import_benchmark("timeline").await_turn, ["a", "b"]
    others = [tmp_path / f"{name}.{rank}.ready" for name in sides for rank in range(2)]
    done = [tmp_path / f"a.{rank}.done" for rank in range(2)]
    for path in (*others, *done):
        path.touch()
    await_turn("b", sides, 0, tmp_path, seconds=1e9)
    done[1].unlink()
    await_turn("a", sides, 1, tmp_path, seconds=1e9)
    await_turn("b", sides, 1, tmp_path, seconds=0.1)  # it goes on after so long
