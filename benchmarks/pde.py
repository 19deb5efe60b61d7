"""`PDEModule` on one GPU: stock Lightning, with torch.compile, the preset, `StepGraph`, and loops without Lightning.

    python benchmarks/pde.py --budget 540 --rounds 3 --output pde.jsonl     # again until nothing is left
    python benchmarks/pde.py --report pde.jsonl --json pde.json

Random fields of two channels on 128 x 128 points, already on the GPU. The sizes 10M, 30M and 130M at batch 4, 24 and
96, and rollouts of 4 steps. All sides train with torch's fused AdamW. A loop without Lightning replays one CUDA graph
for the whole step, optimizer included: `hand` of eager code, `hand_compile` of compiled code. Its time to the first
step does not contain the recording. Everything else is as in `zoo.py`, which makes the runs.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Generator, Tensor
from zoo import LINES, SIDES, Benchmark, Records, main
from zoo_modules import Line
from zoo_modules.base import DISTINCT, Make, Work, normal
from zoo_run import Meter, Side, Steps, preset

from lightning_ups.callbacks import ActivationCheckpoint, Compile, StepGraph
from lightning_ups.models import PDEModule
from lightning_ups.models.field_metrics import nrmse
from lightning_ups.models.optimizer import decay_groups
from lightning_ups.models.pde import Size

POINTS, CHANNELS = 128, 2
# Size, batch, steps of a rollout and whether they are detached, in the order in which they are run.
SHAPES: Sequence[tuple[Size, int, int, bool]] = (
    ("10M", 4, 1, False),
    ("30M", 24, 1, False),
    ("130M", 24, 1, False),
    ("10M", 4, 4, False),
    ("30M", 24, 4, False),
    ("10M", 4, 4, True),
    ("130M", 4, 1, False),
    ("30M", 4, 1, False),
    ("10M", 24, 1, False),
    ("10M", 96, 1, False),
    ("30M", 96, 1, False),
    ("130M", 96, 1, False),
    ("30M", 24, 4, True),
    ("130M", 4, 4, False),
    ("130M", 24, 4, False),
)
WARM = 3  # eager steps before a recording


def load() -> None:
    """Enter the lines and the sides that the zoo does not have."""
    for size, batch, steps, detach in SHAPES:
        name = f"{size}_b{batch}" + (f"_rollout{steps}" if steps > 1 else "") + ("_detached" if detach else "")
        build = partial(_work, size, batch, steps, detach)
        LINES[name] = Line(name, "rollout" if steps > 1 else "one step", (), "", build)
    SIDES.update(
        hand=Side(dict, loop=by_hand),
        hand_compile=Side(dict, loop=partial(by_hand, is_compiled=True)),
        step_graph=Side(_graphed),
        step_graph_eager=Side(partial(_graphed, is_compiled=False)),
        float8=Side(partial(preset, "h200-fp8")),
        recompute=Side(_recomputed),
    )


def _work(size: Size, batch: int, steps: int, detach: Any, tiny: Any) -> Work:
    """Return a module and its batches; ``tiny`` for the CPU."""
    if tiny:
        size, batch = "tiny", 2
    points = 16 if tiny else POINTS
    # AdamW's options do not depend on the length of the run, which timing decides.
    module = PDEModule(size=size, channels=CHANNELS, conditions=1, detach=detach, schedule="constant", warmup_steps=0)
    fields = (CHANNELS, points, points)
    return Work(module, normal((batch, 1, *fields), (batch, steps, *fields), (batch, 1)))


def by_hand(module: PDEModule, make: Make, meter: Meter, *, is_compiled: bool = False) -> None:
    """Train without Lightning. On a GPU the whole step is one CUDA graph; on a CPU it runs as it is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    module.to(device)
    batches = [[tensor.to(device) for tensor in make(Generator().manual_seed(number))] for number in range(DISTINCT)]
    static = [tensor.clone() for tensor in batches[0]]
    rate: Any = torch.tensor(module.lr, device=device) if on_gpu else module.lr
    groups = decay_groups(module.parameters(), weight_decay=module.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=module.betas, fused=True, capturable=on_gpu)
    if is_compiled and on_gpu:
        module.model.compile()

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        inputs, targets, conditions = static
        with torch.autocast(device.type, torch.bfloat16):
            found = module.model.rollout(inputs, conditions, steps=targets.shape[1], detach=module.detach)
            loss = nrmse(found.flatten(0, 1), targets.flatten(0, 1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream() if on_gpu else None
    graph: torch.cuda.CUDAGraph | None = None
    loss, run = torch.zeros(()), Steps()
    while not run.should_stop:
        for place, tensor in zip(static, batches[run.steps % DISTINCT], strict=True):
            place.copy_(tensor)
        if on_gpu:
            rate.fill_(module.lr)  # where a schedule would set it
        if side is None:
            loss = step()
        elif run.steps < WARM:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    loss = step()
            graph.replay()
        run.steps += 1
        meter.on_train_batch_end(run, module, {"loss": loss}, None, 0)  # type: ignore[arg-type]
    meter.on_train_end(run, module)  # type: ignore[arg-type]


def _graphed(*, is_compiled: bool = True) -> dict[str, Any]:
    """Return the preset with one CUDA graph for the whole step, in place of those that it may choose."""
    settings = preset()
    callbacks = [callback for callback in settings["callbacks"] if not isinstance(callback, Compile)]
    compiles = [Compile(scope="model")] if is_compiled else []
    return {**settings, "callbacks": [*callbacks, *compiles, StepGraph(emulate=not torch.cuda.is_available())]}


def _recomputed() -> dict[str, Any]:
    settings = preset()
    settings["callbacks"].append(ActivationCheckpoint(save="matmuls"))
    return settings


def summary(records: Records) -> dict[str, Any]:
    """Return for each line and side the medians over rounds, and the ratio of step times to ``stock`` and ``hand``."""
    lines: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for run in records["run"]:
        lines.setdefault(run["line"], {}).setdefault(run["side"], []).append(run)
    return {name: {side: _row(runs, sides) for side, runs in sides.items()} for name, sides in lines.items()}


def _row(runs: Sequence[Mapping[str, Any]], sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    times = _times(runs)
    if not times:
        return {"error": next((run["error_line"] for run in runs if "error_line" in run), "no time")}
    middle = median(times)
    row: dict[str, Any] = {"rounds": len(times), "step_ms": middle, "spread": (max(times) - min(times)) / middle}
    for key in ("peak_gib", "first_step_s", "busy"):
        found = [run[key] for run in runs if run.get(key) is not None]
        row[key] = median(found) if found else None
    row["loss"] = fmean(runs[-1]["losses"][-5:])
    hands = [median(each) for name, of in sides.items() if name.startswith("hand") and (each := _times(of))]
    stock = _times(sides.get("stock", ()))
    row["over_stock"] = median(stock) / middle if stock else None
    row["over_hand"] = min(hands) / middle if hands else None  # the fastest loop
    return row


def _times(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [run["step_ms"] for run in runs if "step_ms" in run and "error" not in run]


def report(records: Records) -> str:
    """Return a table with a row for each line and side."""
    head = ("line", "side", "ms", "spread", "over stock", "over hand", "peak GiB", "first step s", "busy", "loss")
    cards = sorted({card for call in records["call"] for card in call["cards"]})
    lines = [", ".join(cards) or "CPU", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    order = {name: place for place, name in enumerate(LINES)}
    for name, sides in sorted(summary(records).items(), key=lambda item: order.get(item[0], len(order))):
        for side, row in sides.items():
            cells = (
                [f"{row['step_ms']:.3f}", f"{row['spread']:.1%} of {row['rounds']}"]
                + [_cell(row[key], 2) for key in ("over_stock", "over_hand", "peak_gib", "first_step_s", "busy")]
                + [_cell(row["loss"], 4)]
                if "step_ms" in row
                else [row["error"], *[""] * 7]
            )
            lines.append(f"| {' | '.join([name, side, *cells])} |")
    return "\n".join(lines)


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main(
        Benchmark(
            script=Path(__file__),
            description=__doc__,
            load=load,
            sides=("stock", "preset", "hand_compile", "step_graph", "stock_compile", "hand"),
            share=1,
            longest_first=False,
            report=report,
            summary=summary,
        )
    )
