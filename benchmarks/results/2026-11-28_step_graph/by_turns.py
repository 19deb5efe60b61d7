"""Blocks of steps by turns, in one process: StepGraph in a Trainer, and a loop without Lightning that replays a graph.

From the repository's root: python benchmarks/results/2026-11-28_step_graph/by_turns.py
"""

import sys
import threading
import time
from statistics import median

sys.path.insert(0, "benchmarks")

import pde
import torch
from lightning.pytorch import Callback, Trainer
from zoo_modules import LINES
from zoo_modules.base import Batches
from zoo_run import SIDES

WARM, BLOCK, ROUNDS = 60, 150, 8
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Turns:
    """Lets one of two threads run at a time, a block of steps each, and times the blocks."""

    def __init__(self):
        self.mine = {"ours": threading.Event(), "hand": threading.Event()}
        self.times = {"ours": [], "hand": []}
        self.host = []

    def end(self, who, step, stop):
        if step < WARM or (step - WARM) % BLOCK:
            return
        if step > WARM:
            if who == "ours":
                self.host.append((time.thread_time() - self.cpu) / BLOCK * 1e3)
            torch.cuda.synchronize()
            self.times[who].append((time.perf_counter() - self.began) / BLOCK * 1e3)
        self.mine["hand" if who == "ours" else "ours"].set()
        if len(self.times[who]) == ROUNDS:
            stop()
            return
        self.wait(who)
        torch.cuda.synchronize()
        self.began, self.cpu = time.perf_counter(), time.thread_time()

    def wait(self, who):
        self.mine[who].wait()
        self.mine[who].clear()


class Side(Callback):
    def __init__(self, who, turns):
        self.who, self.turns, self.steps = who, turns, 0

    def on_train_batch_end(self, run, *args):
        self.steps += 1
        self.turns.end(self.who, self.steps, lambda: setattr(run, "should_stop", True))


def compare(side, loop, line):
    turns = Turns()
    torch.manual_seed(0)
    work, other = LINES[line].build(False), LINES[line].build(False)

    def by_hand():
        turns.wait("hand")
        SIDES[loop].loop(other.module, other.batch, Side("hand", turns))

    thread = threading.Thread(target=by_hand, daemon=True)
    thread.start()
    settings = dict(SIDES[side].settings())
    callbacks = [*settings.pop("callbacks"), Side("ours", turns)]
    fit = Trainer(max_epochs=-1, accelerator="gpu", devices=1, callbacks=callbacks, **QUIET, **settings)
    fit.fit(work.module, datamodule=Batches(work.batch, epoch=1_000_000))
    thread.join(20)
    ours, hand = median(turns.times["ours"]), median(turns.times["hand"])
    print(f"{line} {side} / {loop}: {ours:.4f} / {hand:.4f} ms = {ours / hand:.4f}, host {median(turns.host):.2f} ms")
    for who, times in turns.times.items():
        print("  ", who, *[f"{ms:.3f}" for ms in times], flush=True)


if __name__ == "__main__":
    pde.load()
    compare("step_graph_eager", "hand", "10M_b4")
    compare("step_graph", "hand_compile", "10M_b4")
