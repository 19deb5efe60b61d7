"""What README and the pages say was measured is what the raw output says."""

import argparse
import csv
import itertools
import json
import re
import shutil
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()
MEASURED = "".join((ROOT / "docs" / "results" / f"{gpu}.md").read_text() for gpu in ("h100", "h200"))
SPEEDS = ("tok_s_gpu", "tokens_per_s_per_gpu", "tok_s")
OURS, TITAN, BARE = {"side": "ours"}, {"side": "torchtitan"}, {"side": "bare"}
SIMPLE, FSDP2 = ({"way": way, "cache": "cold"} for way in ("SimpleFSDP", "FSDP2, blocks compiled"))
UNSHARDED = {"way": "FSDP2, eager", "cache": "cold"}
EIGHT, BY_HAND, AHEAD = (
    {"name": f"8B {way}, batch 2"} for way in ("ours", "stock ModelParallel, by hand", "ours, prefetch 2")
)
EIGHT_ON_TWO, BY_HAND_ON_TWO = (
    {"name": f"8B {way}, 2 GPUs, batch 1"} for way in ("ours", "stock ModelParallel, by hand")
)
EAGER, BLOCKS, MODEL, MATMULS, NOTHING = (
    {"case": case} for case in ("eager", "compile", "compile model", "compile + matmuls", "compile + nothing")
)
PAIRS = {  # by what a row of the page has, and no other
    'Compile(scope="model")': (MODEL, EAGER),
    "`Compile()`, by blocks": (BLOCKS, EAGER),
    **{f"][{number}]": (OURS, TITAN) for number in range(3, 9)},
    "][5]": ({"side": "ours, cast by kernels"}, TITAN),  # which is what ours does since
    "][9]": (SIMPLE, FSDP2),
    "][11]": (EIGHT, BY_HAND),
    "][12]": (OURS, BARE),
    "][18]": (OURS, {"side": "bare, torch alone"}),
    "][19]": (OURS, {"side": "stock"}),
    "][20]": (OURS, TITAN),
    "][21]": (SIMPLE, FSDP2),
    "][22]": (EIGHT_ON_TWO, BY_HAND_ON_TWO),
    "[2.43x][23]": (OURS, {"side": "bare, torch alone"}),
    "[1.00x][23]": (OURS, {"side": "bare, graphs"}),
    "][24]": (OURS, TITAN),
    "][25]": (OURS, {"side": "stock"}),
    "][26]": ({"side": "ours, autocast"}, {"side": "stock, compiled"}),
    "the quickstart": ({"case": "trainer 1"}, {"case": "bare 1"}),
}


def raw(folder: Path) -> list[dict]:
    lines = folder / "results.jsonl"
    if lines.exists():
        return [json.loads(line) for line in lines.read_text().splitlines()]
    return json.loads((folder / "result.json").read_text())


def runs(folder: Path, wanted: dict) -> list[dict]:
    found = [run for run in raw(folder) if wanted.items() <= run.items() and "error" not in run]
    assert found, f"{folder.name} has no run of {wanted}"
    return found


def speed(folder: Path, wanted: dict) -> float:
    return statistics.median(next(run[name] for name in SPEEDS if name in run) for run in runs(folder, wanted))


def peak(folder: Path, wanted: dict) -> float:
    return max(run["peak_gib"] for run in runs(folder, wanted))


def as_told(value: float, told: str) -> str:
    """Return ``value`` with as many digits as what is told of it has."""
    return f"{value:.{len(told.partition('.')[2])}f}"


def row(piece: str) -> tuple[list[str], Path]:
    """Return the cells of the row that has ``piece``, and the folder of its raw output."""
    (line,) = [line for line in rows(MEASURED) if piece in line]
    return line.split("|")[1:-1], (ROOT / "docs" / "results" / raw_output(line, MEASURED)).resolve()


def rows(text: str) -> list[str]:
    """Return the rows of figures that lead to raw output."""
    return [line for line in text.splitlines() if line.startswith("|") and re.search(r"\]\[\d+\]", line)]


def raw_output(line: str, text: str) -> str:
    (number,) = re.findall(r"\]\[(\d+)\]", line)
    (link,) = re.findall(rf"^\[{number}\]: (\S+)/README\.md$", text, flags=re.MULTILINE)
    return link


@pytest.mark.parametrize("piece", PAIRS)
def test_the_rows_are_those_of_the_raw_output(piece):
    (_, *cells, gain), folder = row(piece)
    sides = PAIRS[piece]
    for side, cell in zip(sides, cells, strict=True):
        ((tokens, unit, gib),) = re.findall(r"([\d.]+) ([KM])\b(?:, ([\d.]+) GiB)?", cell)
        assert tokens == as_told(speed(folder, side) / {"K": 1e3, "M": 1e6}[unit], tokens)
        assert gib in ("", as_told(peak(folder, side), gib))
    (ratio,) = re.findall(r"\[([\d.]+)x\]", gain)
    assert ratio == as_told(speed(folder, sides[0]) / speed(folder, sides[1]), ratio)


def test_the_row_of_checkpoints_is_that_of_the_raw_output():
    (_, ours, theirs, gain), folder = row("ActivationCheckpoint(save=")
    held = [as_told(peak(folder, case), "0.0") for case in (MATMULS, NOTHING, BLOCKS)]
    assert held == re.findall(r"\d+\.\d", ours + theirs)
    rates = [as_told(speed(folder, case) / speed(folder, BLOCKS), "0.00") for case in (MATMULS, NOTHING)]
    assert rates == re.findall(r"\d\.\d\d", gain)


def test_the_row_of_the_loss_is_that_of_the_raw_output():
    (_, ours, theirs, gain), folder = row("`linear_cross_entropy`")
    lines = (folder / "linear_cross_entropy.jsonl").read_text().splitlines()
    timed = [run for run in map(json.loads, lines) if (run.get("dim"), run.get("vocab")) == (2048, 128256)]
    found = {run["way"]: run for run in timed if "milliseconds" in run}
    chunked, usual = found["ours, auto, rounded"], found["usual, compiled"]
    held = [as_told(run["peak_gib"], "0.0") for run in (chunked, usual)]
    assert held == re.findall(r"\d+\.\d", ours + theirs)
    (rate,) = re.findall(r"\d\.\d\d", gain)
    assert rate == as_told(usual["milliseconds"] / chunked["milliseconds"], rate)


def test_the_rows_of_offloading_are_those_of_the_raw_output():
    (_, ours, theirs, gain), folder = row("131072 tokens")
    moved, kept = {"case": "optimizer offload, checkpointing"}, {"case": "checkpointing"}
    for side, cell in ((moved, ours), (kept, theirs)):
        told = [as_told(speed(folder, side) / 1e3, "0.0"), as_told(peak(folder, side), "0.0")]
        assert told == re.findall(r"\d+\.\d", cell)
    (gib, ratio) = re.findall(r"[\d.]+(?= GiB)|\d\.\d\d", gain)
    assert gib == as_told(peak(folder, kept) - peak(folder, moved), "0")
    assert ratio == as_told(speed(folder, moved) / speed(folder, kept), "0.00")
    (_, ours, theirs, gain), folder = row("the largest GPT")
    sizes = [max(run["parameters"] for run in raw(folder) if name in run["case"]) for name in ("together", "plain")]
    assert [as_told(size / 1e9, "0.0") for size in sizes] == re.findall(r"\d+\.\d", ours + theirs)
    assert re.findall(r"[\d.]+(?=x\])", gain) == [as_told(sizes[0] / sizes[1], "0.00")]


def test_the_row_of_images_is_that_of_the_raw_output():
    (_, *cells, gain), folder = row("ViT-L of timm")
    found = [json.loads((folder / f"measure_vit_{name}.json").read_text()) for name in ("tensorwise", "bf16")]
    for run, cell in zip(found, cells, strict=True):
        told = (as_told(128e3 / run["step_ms"], "0"), as_told(run["peak_gib"], "0.0"))
        assert [told] == re.findall(r"(\d+) images, ([\d.]+) GiB", cell)
    assert re.findall(r"\[([\d.]+)x\]", gain) == [as_told(found[1]["step_ms"] / found[0]["step_ms"], "0.00")]


@pytest.mark.parametrize("model", ["1B", "150M", "vit", "mixed", "narrow"])
def test_what_was_predicted_and_measured_is_as_told(model):
    said, found = (RESULTS / f"2026-11-24_float8_{name}" for name in ("predictions", "measured"))
    if model == "narrow":
        said = found = RESULTS / "2026-11-25_float8_narrow"
    predicted = json.loads((said / f"predict_{model}.json").read_text())
    names = ("bf16", "tensorwise", "auto")
    steps = [json.loads((found / f"measure_{model}_{name}.json").read_text())["step_ms"] for name in names]
    gains = [predicted["gain_all"], steps[0] / steps[1] - 1, predicted["gain_auto"], steps[0] / steps[2] - 1]
    told = {"1B": "GPT 1.5 B", "150M": "GPT 150 M", "vit": "ViT-L", "mixed": "six blocks", "narrow": "twelve blocks"}
    page = (ROOT / "docs" / "guides" / "advise.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {told[model]}"))
    assert re.findall(r"[+-][\d.]+(?= %)", line) == [f"{100 * gain:+.1f}" for gain in gains]
    assert max(abs(gains[0] - gains[1]), abs(gains[2] - gains[3])) < 0.05
    assert steps[2] < 1.01 * min(steps[:2])


def test_what_auto_gained_beside_bfloat16_in_one_call_is_as_told():
    folder = RESULTS / "2026-11-25_float8_measured_150M"
    bf16, auto = (
        json.loads((folder / f"measure_150M_{name}.json").read_text())["step_ms"] for name in ("bf16", "auto")
    )
    predicted = json.loads((RESULTS / "2026-11-24_float8_predictions" / "predict_150M.json").read_text())["gain_auto"]
    gain = bf16 / auto - 1
    assert abs(gain - predicted) < 0.05
    assert (
        f"{100 * gain:+.1f} % compared with bfloat16 in one call"
        in (ROOT / "docs" / "guides" / "advise.md").read_text()
    )
    text = (folder / "README.md").read_text()
    assert f"| {bf16:.2f} |" in text
    assert f"| {auto:.2f} | {100 * gain:+.1f} % | {100 * predicted:+.1f} % |" in text


def test_speeds_and_losses_by_recipe_are_as_told():
    again = ("2026-11-24_float8_rows/speed_gw_hp", "2026-11-25_float8_rowwise", "2026-11-25_float8_formats/speed/a")
    speeds = [RESULTS / name for name in ("2026-11-24_float8_speed", *again)]
    ratios, peaks = {}, {}
    for folder in speeds:  # what was measured again comes last
        found = {path.stem.removeprefix("speed_"): json.loads(path.read_text()) for path in folder.glob("speed_*.json")}
        ratios |= {name: run["tokens_per_s"] / found["bf16"]["tokens_per_s"] for name, run in found.items()}
        peaks |= {name: run["peak_gib"] for name, run in found.items()}
    losses = RESULTS / "2026-11-24_float8_losses"
    ends = {path.stem: json.loads(path.read_text())["last_tenth"] for path in losses.glob("*/losses_*.json")}
    for seed in (0, 1, 2):  # what is `tensorwise` now has another name in the raw output, and the other way round
        ends[f"losses_hybrid_seed_{seed}"] = ends[f"losses_tensorwise_seed_{seed}"]
        ends[f"losses_tensorwise_seed_{seed}"] = formats(f"losses_tensorwise_without_e5m2_seed_{seed}")
    ratios["hybrid"], peaks["hybrid"] = ratios.pop("tensorwise_hybrid"), peaks.pop("tensorwise_hybrid")
    page = (ROOT / "docs" / "guides" / "precision.md").read_text().partition("### What it costs")[2].partition("###")[0]
    assert re.findall(r"which\sare (\S+), (\S+) and (\S+):", page) == [
        tuple(f"{ends[f'losses_bf16_seed_{seed}']:.3f}" for seed in (0, 1, 2))
    ]
    names = {
        "BF16Precision": "bf16",
        "the same by autocast": "autocast",
        "number_format: hybrid": "hybrid",
        "losses from another card": "tensorwise",
    }
    names |= {each: f"te_{each}" for each in ("current", "delayed", "block")}
    told = {}
    for line in re.findall(r"^\| (?!\|).*", page, flags=re.MULTILINE):
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = name.rpartition(", ")[2].strip("`")
        told[names.get(name, name)] = cells
    for name, (ratio, peak_gib, *lost) in told.items():
        assert ratio == (as_told(ratios[name], ratio) if name in ratios else "")
        assert peak_gib == (as_told(peaks[name], peak_gib) if name in peaks else "")
        for seed, more in enumerate(lost):
            end, plain = (ends.get(f"losses_{each}_seed_{seed}") for each in (name, "bf16"))
            assert more == ("" if name == "bf16" or end is None else f"{end - plain:+.3f}")
    assert told.keys() == ratios.keys() | {"autocast"}
    assert len(told) == 9


def formats(name: str) -> float:
    (path,) = (RESULTS / "2026-11-25_float8_formats").glob(f"*/**/{name}.json")
    return json.loads(path.read_text())["last_tenth"]


def test_the_losses_of_two_formats_are_as_told():
    folder = RESULTS / "2026-11-25_float8_formats"
    text = (folder / "README.md").read_text()
    large = (ROOT / "docs" / "guides" / "precision.md").read_text()
    above = {"e4m3": [], "e5m2": []}
    for seed in (0, 1):
        plain = formats(f"losses_8B_bf16_seed_{seed}")
        ends = {
            "e5m2": formats(f"losses_8B_tensorwise_seed_{seed}"),
            "e4m3": formats(f"losses_8B_tensorwise_without_e5m2_seed_{seed}"),
        }
        cells = [f"{end:.4f} ({end - plain:+.4f})" for end in ends.values()]
        assert f"| 8 B, seed {seed} | {plain:.4f} | {' | '.join(cells)} |" in text
        fine, coarse = (f"{ends[name]:.3f} ({ends[name] - plain:+.3f}) by" for name in ("e4m3", "e5m2"))
        assert f"seed {seed}: {plain:.3f} in bfloat16, {fine} `tensorwise`, {coarse} `hybrid`" in large
        for name, end in ends.items():
            above[name].append(end - plain)
    older = {path.stem: path for path in (RESULTS / "2026-11-24_float8_losses").glob("*/losses_*.json")}
    bf16, hybrid = (
        [json.loads(older[f"losses_{name}_seed_{seed}"].read_text())["last_tenth"] for seed in (0, 1, 2)]
        for name in ("bf16", "tensorwise")
    )
    other_card = formats("losses_bf16_seed_0") - bf16[0]
    bf16[0] += other_card / 2
    hybrid[0] = (hybrid[0] + formats("losses_tensorwise_seed_0")) / 2
    above["e5m2"] += [end - plain for end, plain in zip(hybrid, bf16, strict=True)]
    finer = [formats(f"losses_tensorwise_without_e5m2_seed_{seed}") for seed in (0, 1, 2)]
    above["e4m3"] += [end - plain for end, plain in zip(finer, bf16, strict=True)]
    means = {name: statistics.mean(each) for name, each in above.items()}
    assert f"e5m2 ends {means['e5m2']:.3f} above bfloat16 and e4m3 {-means['e4m3']:.3f} below" in " ".join(text.split())
    low, high = -min(above["e4m3"]), max(above["e4m3"])
    words = f"between {low:.3f} below and {high:.3f} above bfloat16 with the same batches"
    page = " ".join(MEASURED.split())
    assert words in page
    assert f"bfloat16 itself ended {other_card:.3f} apart on two cards" in page
    assert f"up to {max(above['e5m2']):.3f} above" in page


def test_each_fault_is_named_in_what_was_verified():
    folder = RESULTS / "2026-11-24_verify"
    parts = (folder, folder / "rest", folder / "compiled", RESULTS / "2026-11-25_verify_compiled")
    cases = [case for part in parts for case in raw(part) if "error" not in case]
    assert len({case["case"] for case in cases}) == 11
    assert all(case["green"] and {*case["faults"].values()} == {"model.layers.11"} for case in cases)
    assert all(len(case["faults"]) == 4 for case in cases)
    powers = sorted(case["smallest fault, in bands"] for case in cases)
    text = (ROOT / "docs" / "guides" / "verify.md").read_text()
    for power in (powers[0], max(power for power in powers if power < 10), powers[-1]):
        assert f"{power:.1f}" in text


def test_how_long_a_save_blocks_is_as_told():
    folder = RESULTS / "2026-11-24_checkpoint_blocking"
    behind, at_once = (run for way in ("async", "sync") for run in runs(folder, {"way": way}))
    text = (ROOT / "docs" / "guides" / "checkpoints.md").read_text()
    (first, *later), blocked = behind["blocked_s_slowest_rank"], at_once["blocked_s_slowest_rank"]
    assert f"| {first:.2f} s the first time, then {max(later):.2f} s |" in text
    assert f"| {min(blocked):.2f} to {max(blocked):.2f} s |" in text
    for run in (behind, at_once):
        speeds = run["writing_gb_per_s"]
        assert f"| {min(speeds):.1f} to {max(speeds):.1f} GB/s |" in text
    steps = (behind["step_s_while_writing_median"], behind["step_s_median"])
    assert "| {:.1f} ms instead of {:.1f} |".format(*(1000 * step for step in steps)) in text


def test_the_losses_that_were_run_with_other_seeds_are_as_told():
    losses = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("2026-11-24_float8_losses/*/losses_*")}
    lines = (RESULTS / "2026-11-24_float8_losses" / "README.md").read_text()
    ends = {name: found["last_tenth"] for name, found in losses.items()}
    for name, seed in itertools.product(("autocast", "rowwise_with_gw_hp", "rowwise", "tensorwise"), (0, 1, 2)):
        end = ends[f"losses_{name}_seed_{seed}"]
        assert f"| {end:.4f} | {end - ends[f'losses_bf16_seed_{seed}']:+.4f} |" in lines


def test_rows_in_float8_are_as_fast_as_told():
    folder = RESULTS / "2026-11-24_float8_rows"
    for recipe, of in (("rowwise", "speed"), ("rowwise_with_gw_hp", "speed_gw_hp")):
        plain, rows = (json.loads((folder / of / f"speed_{name}.json").read_text()) for name in ("bf16", recipe))
        gain, peak = rows["tokens_per_s"] / plain["tokens_per_s"], rows["peak_gib"]
        assert f"{recipe} | {rows['tokens_per_s']:.0f} | {gain:.3f} | {peak} |" in (folder / "README.md").read_text()
    text = (folder / "README.md").read_text()
    defaults = {"scaled_rows": "(4096, 8192)", "column_maxima": "(16, 256, 2)", "scaled_columns": "(128, 128, 64, 1)"}
    cases = {case["case"]: case for case in raw(folder / "casts") if case["case"] in defaults}
    later = {case["case"]: case["shapes"] for case in raw(folder / "casts_again")}
    for shape in cases["scaled_rows"]["shapes"]:
        found = [cases[name]["shapes"][shape]["TB_s"] for name in defaults]
        cells = [f"{max(of.values()):.2f}, {of[at]:.2f}" for of, at in zip(found, defaults.values(), strict=True)]
        line, line_later = [line for line in text.splitlines() if line.startswith(f"| {shape.replace('x', ' x ')}")]
        assert line.endswith(f"| {' | '.join(cells)} |"), (line, cells)
        speeds = [later[name][shape]["TB_s"] for name in ("inductor_rows", "column_maxima")]
        cells = [speeds[0]["compiled"], max(found[0].values()), speeds[1]["(16, 512, 4)"]]
        assert line_later.endswith(f"| {' | '.join(f'{cell:.2f}' for cell in cells)} |"), (line_later, cells)


@pytest.mark.parametrize(
    "folder", ["2026-11-24_float8_measured_narrow", "2026-11-25_float8_narrow/short_steps", "2026-11-25_float8_narrow"]
)
def test_what_narrow_blocks_take_is_as_told(folder):
    folder = RESULTS / folder
    runs_of = {
        name: json.loads((folder / f"measure_narrow_{name}.json").read_text())
        for name in ("bf16", "tensorwise", "auto")
    }
    readme = (folder if (folder / "README.md").exists() else folder.parent) / "README.md"
    times, text = {name: run["step_ms"] for name, run in runs_of.items()}, readme.read_text()
    assert f"`BF16Precision` | {times['bf16']:.2f} |" in text
    assert (
        f"`tensorwise` | {times['tensorwise']:.2f} | {times['bf16'] / times['tensorwise'] - 1:+.1%}".replace("%", " %")
        in text
    )
    assert f"bfloat16 again | {times['auto']:.2f} | {times['bf16'] / times['auto'] - 1:+.1%}".replace("%", " %") in text
    assert runs_of["auto"]["converted"] == runs_of["bf16"]["converted"] == 0


def test_a_warm_start_is_as_told():
    folder, page = RESULTS / "2026-11-24_compile_cache", (ROOT / "docs" / "guides" / "compile.md").read_text()
    cold, warm = (runs(folder, {"case": f"bf16, {kind}"})[0] for kind in ("cold", "warm"))
    assert warm["loaded"] == cold["saved"] > 0
    assert warm["losses"][0] == cold["losses"][0]
    told = [f"{run['compile']['groups'][0]['seconds']:.1f} s" for run in (cold, warm)]
    assert "| {} | {} |".format(*told) in page
    waits = cold["first step s"], warm["first step s"]
    several = runs(folder / "tensorwise", {"device": "NVIDIA H200"})
    assert several[1]["loaded"] == several[0]["saved"] > 0
    assert several[1]["losses"][0] == several[0]["losses"][0]
    both = [f"{run['compile']['groups'][0]['seconds']:.1f} s, {run['first step s']:.1f} s" for run in several]
    assert "`Float8Precision` | {} | {} |".format(*both) in page
    assert "| {:.1f} s | {:.1f} s |".format(*waits) in page
    (_, ours, theirs, gain), _ = row("][17]")
    assert re.findall(r"[\d.]+(?= s\b)", ours + theirs) == [f"{wait:.1f}" for wait in reversed(waits)]
    assert f"[{waits[0] - waits[1]:.0f} s]" in gain


def test_the_row_of_rows_in_float8_is_that_of_the_raw_output():
    (_, *cells, gain), folder = row("][16]")
    found = [json.loads((folder / f"speed_{name}.json").read_text()) for name in ("rowwise", "bf16")]
    for run, cell in zip(found, cells, strict=True):
        assert f"{run['tokens_per_s'] / 1e3:.1f} K, {run['peak_gib']:.1f} GiB" in cell
    assert f"[{found[0]['tokens_per_s'] / found[1]['tokens_per_s']:.2f}x]" in gain


def test_the_rows_of_physics_are_those_of_the_raw_output():
    for number, file, sides in (
        (27, "pde.jsonl", ("preset", "stock")),
        (28, "second.jsonl", ("step_graph", "hand_compile")),
    ):
        (_, *cells, gain), folder = row(f"][{number}]")
        lines = map(json.loads, (folder / file).read_text().splitlines())
        found = {run["side"]: run for run in lines if run.get("line") == "10M_b4"}
        for side, cell in zip(sides, cells, strict=True):
            ((ms, gib),) = re.findall(r"([\d.]+) ms(?:, ([\d.]+) GiB)?", cell)
            assert ms == as_told(found[side]["step_ms"], ms)
            assert gib in ("", as_told(found[side]["peak_gib"], gib))
        (ratio,) = re.findall(r"\[([\d.]+)x\]", gain)
        assert ratio == as_told(found[sides[1]]["step_ms"] / found[sides[0]]["step_ms"], ratio)


@pytest.mark.parametrize("day", ["2026-11-24", "2026-11-25"])
def test_the_suite_was_green(day):
    folder = RESULTS / f"{day}_suite"
    text = (folder / "printed.txt").read_text()
    parts = re.findall(r"^(?:(\d+) failed, )?(\d+) passed, (\d+) skipped", text, flags=re.MULTILINE)
    told = re.findall(r"\*\*(\d+) passed\*\*, (\d+) skipped", (folder / "README.md").read_text())
    assert [part[1:] for part in parts] == told
    assert not any(failed for failed, *_ in parts)


def test_each_row_is_held_to_something():
    others = [
        "ActivationCheckpoint(save=",
        "`linear_cross_entropy`",
        "131072 tokens",
        "the largest GPT",
        "ViT-L of timm",
        "][16]",
        "][17]",
        "][27]",
        "][28]",
    ]
    held = [*PAIRS, *others]
    lines = rows(MEASURED)
    assert len(lines) == len(held)
    assert all(sum(piece in line for piece in held) == 1 for line in lines)


def test_readmes_rows_are_among_those_of_the_page():
    def figures(line: str) -> list[str]:
        return re.findall(r"(?<!\w)\d+(?:\.\d+)*", re.sub(r"\]\[\d+\]", "]", "|".join(line.split("|")[2:-1])))

    known = [(raw_output(line, MEASURED).removeprefix("../../"), figures(line)) for line in rows(MEASURED)]
    found = [(raw_output(line, README), figures(line)) for line in rows(README)]
    assert found
    assert all(row in known for row in found)
    linked = re.findall(r"^\[(\d+)\]:", README, flags=re.MULTILINE)
    assert sorted(linked) == sorted({number for line in rows(README) for number in re.findall(r"\]\[(\d+)\]", line)})


def test_the_mean_that_is_told_beside_a_median():
    (*_, gain), folder = row("][12]")
    means = [
        statistics.median(statistics.mean(run["step_ms_all"][30:]) for run in runs(folder, side))
        for side in (BARE, OURS)
    ]
    (told,) = re.findall(r"([\d.]+)x counting", gain)
    assert told == as_told(means[0] / means[1], told)


@pytest.mark.parametrize(
    ("page", "name", "sides"),
    [
        ("fsdp2", "2026-11-22_fsdp2_8B", (EIGHT, BY_HAND, AHEAD)),
        ("fsdp2", "2026-11-25_fsdp2_8B-2", (EIGHT_ON_TWO, BY_HAND_ON_TWO)),
        ("simple_fsdp", "2026-11-22_simple_fsdp_1B-2", (SIMPLE, UNSHARDED)),
        ("simple_fsdp", "2026-11-25_simple_fsdp_8B-2", (SIMPLE, FSDP2, UNSHARDED)),
        ("simple_fsdp", "2026-11-22_simple_fsdp_1B-2_beside_compiled", (SIMPLE, FSDP2)),
    ],
)
def test_the_pages_tables_are_those_of_the_raw_output(page, name, sides):
    text = (ROOT / "docs" / "guides" / f"{page}.md").read_text()
    assert f"benchmarks/results/{name}/README.md" in text
    for side in sides:
        told = f"{speed(RESULTS / name, side):,.0f}".replace(",", " ")
        assert f"| {told} | {peak(RESULTS / name, side):.1f} " in text


def test_the_errors_of_the_physics_example_are_as_told():
    rows = [*csv.DictReader((RESULTS / "2026-11-24_pde" / "metrics.csv").read_text().splitlines())]
    last = [row for row in rows if row["val_error"]][-1]
    names = ("val_error", "val_unchanged", "val_error_far", "val_unchanged_far")
    (paragraph,) = re.findall(
        r"After 300 steps.*?2026-11-24_pde", (ROOT / "docs" / "guides" / "pde.md").read_text(), flags=re.DOTALL
    )
    told = re.findall(r"\d\.\d+", paragraph)
    assert told == [as_told(float(last[name]), value) for name, value in zip(names, told, strict=True)]


@pytest.mark.parametrize(
    "folder", sorted([*RESULTS.glob("20*"), *RESULTS.glob("archive/20*")]), ids=lambda path: path.name
)
def test_a_result_is_explained_beside_its_raw_output(folder):
    text = (folder / "README.md").read_text()
    assert text.startswith("# ")
    assert [path for path in folder.iterdir() if path.name != "README.md"]
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (folder / target).exists(), f"{folder.name} links to {target}"


@pytest.mark.parametrize(
    ("kept", "sets"),
    [
        ("2026-11-24_float8_predictions", {"gpt": ("1B", "150M"), "other": ("vit", "mixed")}),
        ("2026-11-24_float8_predictions_narrow", {"narrow": ("narrow",)}),
    ],
)
def test_predictions_that_are_kept_can_be_measured_against(import_benchmark, monkeypatch, tmp_path, kept, sets):
    float8, kept = import_benchmark("float8"), RESULTS / kept
    shutil.copytree(kept, tmp_path / "out")
    monkeypatch.setattr(float8, "unloadable", lambda *_, **__: None)
    monkeypatch.setattr(float8, "_device", lambda: "NVIDIA H200")

    def chosen(name: str) -> list[str]:
        return float8._chosen(argparse.Namespace(set=name, only="", output=tmp_path / "out", tiny=False))

    for name, models in sets.items():
        assert chosen(f"predict-{name}") == []
        assert chosen(f"measure-{name}") == [f"measure {m} {p}" for m in models for p in ("bf16", "tensorwise", "auto")]
    (table,) = (tmp_path / "out" / "cache" / "lightning_ups" / "float8").iterdir()
    timed = {tuple(product["shape"]) for product in json.loads(table.read_text())["products"]}
    for model in itertools.chain(*sets.values()):
        said = json.loads((kept / f"predict_{model}.json").read_text())
        rows = {tuple(map(int, line["rows x in x out"].split(" x "))) for line in said["table"]}
        assert rows <= timed
        timed -= rows
    assert not timed, "times that no prediction is made of"
