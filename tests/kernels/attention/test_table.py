from lightning_ups.kernels.attention.table import Row, parse_table, tables


def test_a_file_says_what_was_measured():
    row = {"head_dim": 64, "heads": 4, "kv_heads": 2, "seq": 8, "batch": 1, "causal": True}
    times = {"forward": {"math": 1.0}, "training": {"math": 3.0}}
    content = {"device": "Test GPU", "capability": [9, 0], "versions": {"torch": "2"}, "date": "2026-11-22"}
    table = parse_table({**content, "rows": [{**row, **times}]})
    assert (table.device, table.capability, table.date) == ("Test GPU", (9, 0), "2026-11-22")
    assert table.host == {}
    host = {"training": {"math": 0.1}, "forward": {"math": 0.02}}
    assert parse_table({**content, "host": host, "rows": []}).host == host
    assert table.rows == (Row(64, 4, 2, 8, 1, True, {"math": 1.0}, {"math": 3.0}),)


def test_the_package_has_one_of_each_width_of_heads_for_hopper():
    hopper = [table for table in tables() if table.capability == (9, 0)]
    assert {row.head_dim for table in hopper for row in table.rows} == {32, 64, 128, 256}
    assert all({"cudnn", "flash", "fa4"} <= {*row.training} for table in hopper for row in table.rows)
