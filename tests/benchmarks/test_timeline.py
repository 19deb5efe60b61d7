def test_kernels_are_kept_by_their_start(import_benchmark):
    def event(name, stream, start, kind="kernel"):
        return {"cat": kind, "name": name, "ts": start, "dur": 2.0, "args": {"stream": stream}}

    host = {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9}
    trace = [event("nccl", 20, 15.5), host, event("mm", 7, 12), event("copy", 7, 10, "gpu_memcpy")]
    kept = import_benchmark("timeline").kernels(trace)
    assert kept == [("copy", 7, 0, 2), ("mm", 7, 2, 2), ("nccl", 20, 5.5, 2)]
