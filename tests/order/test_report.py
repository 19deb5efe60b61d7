from lightning_ups.order import Report


def test_lines_are_kept_in_order_and_facts_are_merged():
    report = Report()
    report.note("Compile", "12 blocks", blocks=12)
    report.update("Compile", graphs=1)
    report.update("Compile", graphs=2)
    report.note("Compile", "2 graphs")
    report.note("Flags", "TF32 on")
    assert report.lines() == ["Compile: 12 blocks", "Compile: 2 graphs", "Flags: TF32 on"]
    assert report.parts == {
        "Compile": {"lines": ["12 blocks", "2 graphs"], "blocks": 12, "graphs": 2},
        "Flags": {"lines": ["TF32 on"]},
    }


def test_what_is_handed_out_is_a_copy():
    report = Report()
    report.note("Compile", "12 blocks")
    report.parts["Compile"]["lines"].append("mine")
    assert report.lines() == ["Compile: 12 blocks"]
