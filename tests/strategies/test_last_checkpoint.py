"""What ``ckpt_path="last"`` resumes from after a death between any two file operations of a save."""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_ups.state.checkpoint import (
    SavedWeights,
    Saver,
    claim,
    claims,
    folder,
    is_complete,
    meta,
    neighbors,
    newest,
    resolve,
)
from lightning_ups.strategies import FSDP2Strategy
from tests.toys import Net, loader

OPERATIONS = {"fsync", "open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.truncate"}
STARTING = threading.Lock()
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def state(number):
    torch.manual_seed(number)
    return {"state_dict": {f"w{index}": torch.randn(40) for index in range(3)}}


def save(path, number, *, saver=None):
    files = {"meta.pt": meta.dumped({"global_step": number})}
    (saver or Saver(asynchronous=False, threads=2)).save(state(number), files=files, path=path)


def first(path, number):
    save(path / "last.ckpt", number)


def over(path, number):
    save(path / "last.ckpt", number)


def rolling(path, number):
    """Save a checkpoint of another name, delete the one before, and save the last one as a link, as Lightning does."""
    saver, new = Saver(asynchronous=False, threads=2), path / f"step={number}.ckpt"
    save(new, number, saver=saver)
    ModelCheckpoint._link_checkpoint(Stub(), str(new), str(path / "last.ckpt"))
    saver.remove(path / f"step={number - 1}.ckpt")


def one_file(path, number):
    folder.write_file(path / "last.ckpt", {"global_step": number, **state(number)})


class Stub:
    is_global_zero = True

    class strategy:  # noqa: N801
        barrier = staticmethod(lambda: None)


SAVES = {  # what makes the older checkpoint, if there is one, and what the newer
    "first": (None, first),
    "over the one before": (over, over),
    "another name and a link": (rolling, rolling),
    "one file": (one_file, one_file),
    "one file over a folder": (over, one_file),
    "a folder over one file": (one_file, over),
}


def die_in(save, path, number, death, pipe):
    """Save, but die before operation ``death`` on files; send what the operations were."""
    seen, lock, stock = [], threading.Lock(), os.fsync

    def operation(name, args=()):
        if name not in OPERATIONS or (name == "open" and not args[2] & WRITES):
            return
        with lock:
            if len(seen) == death:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append((name, str(args[0])))

    def fsync(descriptor):
        operation("fsync", (os.readlink(f"/proc/self/fd/{descriptor}"),))
        stock(descriptor)

    os.fsync = fsync
    sys.addaudithook(operation)
    save(path, number)
    pipe.send([*seen])


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def operations_of(save, path, number, death, processes):
    here, there = processes.Pipe()
    child = processes.Process(target=die_in, args=(save, path, number, death, there), daemon=True)
    with STARTING:  # which also asks all other processes how they ended, and only the first to ask is told
        child.start()
    there.close()
    wait([child.sentinel], 60)
    with STARTING:
        child.join(0)
    assert child.exitcode == (0 if death is None else -signal.SIGKILL)
    return here.recv() if death is None else []


def trainer_of(path, *, save_last=True, callbacks=()):
    saver = ModelCheckpoint(path, save_last=save_last)
    return Trainer(accelerator="cpu", devices=1, strategy=FSDP2Strategy(), callbacks=[saver, *callbacks], logger=False)


def last_of(trainer, ckpt_path="last"):
    return trainer._checkpoint_connector._parse_ckpt_path(
        TrainerFn.FITTING, ckpt_path, model_provided=True, model_connected=True
    )


def number_in(path):
    """Return which of two saves is at ``path``; all of its weights must be those of it."""
    found = SavedWeights(resolve(Path(path)))
    weights = {name: found[name] for name in found}
    for number in (1, 2):
        expected = state(number)["state_dict"]
        if weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected):
            return number
    raise AssertionError(f"{path} holds neither of the two")


@pytest.mark.filterwarnings("ignore:.*ckpt_path='last':UserWarning", "ignore:.*last checkpoint available:UserWarning")
@pytest.mark.parametrize("kind", SAVES)
def test_a_death_before_any_operation_leaves_the_newest_whole_one_as_the_last(tmp_path, processes, kind):
    before, after = SAVES[kind]
    old = tmp_path / "old"
    old.mkdir()
    if before is not None:
        before(old, 1)
    shutil.copytree(old, tmp_path / "all", symlinks=True)
    operations = operations_of(after, tmp_path / "all", 2, None, processes)
    assert len(operations) >= 4

    def resumed(death):
        path = tmp_path / str(death)
        shutil.copytree(old, path, symlinks=True)
        operations_of(after, path, 2, death, processes)
        return path

    with ThreadPoolExecutor(2) as pool:
        paths = [*pool.map(resumed, range(len(operations)))]
    numbers, trainer = [], trainer_of(tmp_path, save_last="link" if before is rolling else True)
    for death, path in enumerate(paths):
        trainer.checkpoint_callback.dirpath = str(path)
        found = last_of(trainer)
        assert found is None or Path(found).parent == path
        numbers.append(0 if found is None else number_in(found))
        assert numbers[-1] or before is None, f"dead before {operations[death]}: {sorted(os.listdir(path))}"
        after(path, 2)
        assert number_in(last_of(trainer)) == 2, "and the next save is the last"
        claim(path).remove()
        folder.clean(path, unchanged_s=0)
        left = {entry.name for entry in path.iterdir()}
        assert left <= {"last.ckpt", "step=1.ckpt", "step=2.ckpt"}, f"dead before {operations[death]}"
    assert numbers == sorted(numbers), "once the newer one is whole, it is the last"
    assert {*numbers} == {2} | ({0} if before is None else {1})


def test_what_replaces_an_older_one_is_forced_to_the_disk_before_that_is_deleted(tmp_path, processes):
    for kind, (before, after) in SAVES.items():
        path = tmp_path / kind
        path.mkdir()
        if before is None:
            continue
        before(path, 1)
        operations = operations_of(after, path, 2, None, processes)
        named = next(
            n
            for n, (name, at) in enumerate(operations)
            if name == "os.rename" and at.endswith(("complete.json.tmp", ".writing"))
        )
        placed = [n for n, (name, at) in enumerate(operations) if n > named and (name, at) == ("fsync", str(path))]
        gone = [
            n
            for n, (name, at) in enumerate(operations)
            if n > named and name in ("os.remove", "os.rmdir") and not at.endswith(("incomplete", "last.ckpt"))
        ]
        assert placed, kind
        assert not gone or placed[0] < gone[0], (kind, operations)


@pytest.mark.parametrize("suffix", [".saving", ".previous"])
def test_many_processes_put_a_checkpoint_back_at_once(tmp_path, suffix):
    save(tmp_path / "last.ckpt", 1)
    for _ in range(20):
        (tmp_path / "last.ckpt").rename(tmp_path / f"last.ckpt{suffix}")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(folder.settle, [tmp_path] * 8))
        assert os.listdir(tmp_path) == ["last.ckpt"]
    assert number_in(tmp_path / "last.ckpt") == 1


def test_a_save_whose_checkpoint_another_process_has_put_in_place_is_whole(tmp_path, monkeypatch):
    save(tmp_path / "last.ckpt", 1)
    stock = Path.rename

    def rename(self, target):
        result = stock(self, target)
        if str(target).endswith(".previous"):
            folder.settle(tmp_path)  # as another run does that looks for the last one just now
        return result

    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path / "last.ckpt", 2)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert number_in(tmp_path / "last.ckpt") == 2


def test_where_nothing_may_be_renamed_nothing_is_deleted_either(tmp_path, monkeypatch):
    save(tmp_path / "last.ckpt", 1)
    (tmp_path / "last.ckpt").rename(tmp_path / "last.ckpt.previous")

    def refused(self, target):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refused)
    folder.settle(tmp_path)
    assert os.listdir(tmp_path) == ["last.ckpt.previous"]


def test_other_files_of_such_names_are_left_alone(tmp_path):
    save(tmp_path / "last.ckpt", 1)
    (tmp_path / "notes.saving").write_text("notes")
    (tmp_path / "results.previous").mkdir()
    (tmp_path / "results.previous" / "thesis.txt").touch()
    folder.settle(tmp_path)
    assert folder.clean(tmp_path, unchanged_s=0) == {}
    assert {*os.listdir(tmp_path)} == {"last.ckpt", "notes.saving", "results.previous"}


@pytest.mark.filterwarnings("ignore:.*ckpt_path='last'")
def test_on_exception_checkpoints_and_those_that_are_torn(tmp_path):
    callback = OnExceptionCheckpoint(tmp_path / "failed")
    save(tmp_path / "failed" / "on_exception.ckpt", 1)
    (tmp_path / "failed" / "on_exception.ckpt").rename(tmp_path / "failed" / "on_exception.ckpt.previous")
    trainer = trainer_of(tmp_path / "kept", callbacks=[callback])
    assert number_in(last_of(trainer)) == 1
    assert number_in(last_of(trainer, None)) == 1, "Lightning resumes from it without being asked"
    save(tmp_path / "kept" / "last.ckpt", 2)
    assert number_in(last_of(trainer)) == 2
    (tmp_path / "kept" / "last.ckpt" / folder.MARKER).unlink()
    (tmp_path / "kept" / "last.ckpt" / "incomplete").touch()
    assert number_in(last_of(trainer)) == 1
    shutil.rmtree(tmp_path / "failed")
    assert last_of(trainer) is None, "training begins anew where nothing is whole"
    save(tmp_path / "kept" / "step=1.ckpt", 1)
    assert number_in(last_of(trainer)) == 1


def test_debris_is_deleted_and_other_runs_are_named(tmp_path, processes, caplog, recwarn):
    save(tmp_path / "last.ckpt", 1)
    operations = operations_of(over, tmp_path, 2, None, processes)
    half = next(n for n, (_, at) in enumerate(operations) if at.endswith(".metadata.tmp"))
    for name in ("last.ckpt", "step=2.ckpt"):
        child = processes.Process(target=die_claimed, args=(tmp_path, name, half))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    assert (tmp_path / "last.ckpt.saving").exists()
    assert (tmp_path / "step=2.ckpt").exists()
    assert not is_complete(tmp_path / "step=2.ckpt")
    assert [other.is_alive for other in neighbors(tmp_path)] == [False, False]
    fit = trainer_of(tmp_path)
    fit.strategy.connect(Net())
    fit.strategy.lightning_module.trainer = fit
    fit.strategy.checkpoints.check_places()
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".run")} == {"last.ckpt"}
    assert len([*tmp_path.glob(".run*")]) == 1, "only its own"
    assert newest(tmp_path) == tmp_path / "last.ckpt"


def die_claimed(path, name, death):
    claim(path)
    die_in(lambda path, number: save(path / name, number), path, 2, death, None)


def connected(path, **options):
    fit = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FSDP2Strategy(),
        callbacks=[ModelCheckpoint(path, **options)],
        logger=False,
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fit.strategy.connect(Net())
    fit.strategy.lightning_module.trainer = fit
    return fit


@pytest.fixture
def other(tmp_path, processes):
    """Start a run that writes ``step=1.ckpt``, and return its process and what lets it end."""
    here, there = processes.Pipe()
    child = processes.Process(target=hold, args=(tmp_path, there))
    child.start()
    there.close()
    here.recv()

    def end():
        here.close()
        child.join()

    yield child, end
    end()


def hold(path, pipe):
    connected(path, filename="one").strategy.checkpoints.check_places()
    draft = folder.begin(path / "step=1.ckpt")
    pipe.send(None)
    with suppress(EOFError):
        pipe.recv()
    (draft.folder / "data").touch()
    folder.finish(draft, files={}, facts={})


def test_a_run_with_the_names_of_another_is_refused_before_the_first_step(tmp_path, other, processes):
    child, end = other
    first, steps = fitted(tmp_path, processes)
    assert f"{tmp_path} is used by another run, whose checkpoints have the same names: process {child.pid} on" in first
    assert f"Use ModelCheckpoint(dirpath='{tmp_path}-2'), or --trainer.callbacks.ModelCheckpoint.dirpath" in first
    assert steps == 0
    assert (tmp_path / "step=1.ckpt" / "incomplete").exists()
    end()
    assert is_complete(tmp_path / "step=1.ckpt")
    assert fitted(tmp_path, processes) == ("", 3)
    assert [*tmp_path.glob(".run*")] == []
    assert is_complete(tmp_path / "one.ckpt")


def fitted(path, processes):
    """Return the error of a run with checkpoints in ``path``, and the number of its steps."""
    here, there = processes.Pipe()
    child = processes.Process(target=fit_and_tell, args=(path, there))
    child.start()
    there.close()
    found = here.recv()
    child.join()
    return found


def fit_and_tell(path, pipe):
    model, error = Net(), ""
    try:
        connected(path, filename="one").fit(model, loader())
    except ValueError as raised:
        error = str(raised)
    pipe.send((error, len(model.seen or ())))


def test_a_run_with_other_names_trains_beside_it(tmp_path, other):
    child, end = other
    checkpoints = connected(tmp_path, filename="two").strategy.checkpoints
    checkpoints.check_places()
    assert (tmp_path / "step=1.ckpt" / "incomplete").exists()
    save(tmp_path / "two.ckpt", 1)
    with pytest.raises(RuntimeError, match=f"by another run: process {child.pid} on .*own folder in place of"):
        save(tmp_path / "step=1.ckpt", 2)
    with pytest.warns(UserWarning, match="not deleted"):
        folder.remove(tmp_path / "step=1.ckpt")
    checkpoints.close()
    end()
    assert is_complete(tmp_path / "step=1.ckpt")
    save(tmp_path / "step=1.ckpt", 2)
    assert {name for name in os.listdir(tmp_path) if not name.startswith(".run")} == {"step=1.ckpt", "two.ckpt"}


def test_the_draft_of_a_killed_run_is_deleted_at_once(tmp_path, other):
    child, _ = other
    os.kill(child.pid, signal.SIGKILL)
    wait([child.sentinel], 60)  # not reaped: it may be a zombie
    connected(tmp_path, filename="two").strategy.checkpoints.check_places()
    assert not (tmp_path / "step=1.ckpt").exists()
    save(tmp_path / "step=1.ckpt", 2)


@pytest.mark.parametrize("is_users", [False, True])
def test_only_a_folder_that_the_run_created_is_deleted_if_nothing_was_saved(tmp_path, is_users):
    place = tmp_path / "kept"
    if is_users:
        place.mkdir()
    checkpoints = connected(place).strategy.checkpoints
    checkpoints.check_places()
    assert [*place.glob(".run*")]
    checkpoints.close()
    assert place.exists() == is_users
    assert not [*tmp_path.rglob(".run*")]


def test_starts_at_once_leave_one_run(tmp_path, processes):
    results = processes.Queue()
    children = [processes.Process(target=start_and_tell, args=(tmp_path, results)) for _ in range(3)]
    for child in children:
        child.start()
    outcomes = [results.get(timeout=60) for _ in children]
    for child in children:
        child.kill()
        child.join()
    assert sorted(outcomes) == ["refused", "refused", "runs"]


def start_and_tell(path, results):
    try:
        connected(path).strategy.checkpoints.check_places()
        results.put("runs")
    except ValueError:
        results.put("refused")
    time.sleep(60)


@pytest.mark.parametrize("saving", [False, True])
def test_a_draft_of_another_machine_is_left_alone_unless_it_is_old(tmp_path, saving, monkeypatch):
    path = tmp_path / "last.ckpt"
    if saving:
        save(path, 1)
    monkeypatch.setattr(claims, "_own", lambda own=claims._own: replace(own(), host="node7", system="another boot"))
    draft = folder.begin(path)
    monkeypatch.undo()
    os.close(draft.signature.descriptor)
    past = time.time() - 1800
    os.utime(draft.folder / "incomplete", (past, past))
    os.utime(draft.folder, (past, past))
    assert folder.clean(tmp_path, unchanged_s=0) == {}
    if saving:
        save(path, 2)
        assert number_in(path) == 2
        assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "last.ckpt.saving"]
    else:
        with pytest.raises(RuntimeError, match=rf"process \d+ on node7.*last seen 30 min ago.*rm -r {path}"):
            save(path, 2)
    monkeypatch.setattr(folder, "ABANDONED_S", 1700)
    save(path, 2)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_run_of_another_machine_is_named_with_its_age(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "_own", lambda own=claims._own: replace(own(), host="node7", system="another boot"))
    signature = claim(tmp_path, names=["one"])
    monkeypatch.undo()
    os.close(signature.descriptor)
    file = signature.file.rename(tmp_path / ".run-node7-1.json")
    os.utime(file, (time.time() - 1800,) * 2)
    checkpoints = connected(tmp_path, filename="one").strategy.checkpoints
    with pytest.warns(UserWarning, match=r"on another machine: process \d+ on node7, .*, last seen 30 min ago"):
        checkpoints.check_places()
    checkpoints.close()
    assert [*tmp_path.iterdir()] == [file]
