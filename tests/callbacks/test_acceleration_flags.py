import gc

import pytest
import torch
from jsonargparse import ArgumentParser
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from lightning_ups._compat.torch.flags import read_attention, read_tf32
from lightning_ups.callbacks import AccelerationFlags, Compile
from lightning_ups.order import applied
from lightning_ups.transforms.flags import current_flags
from tests.toys import Net, loader, trainer

FLASH, MATH = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::bmm"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Validated(Net):
    def validation_step(self, batch, _):
        pass

    def val_dataloader(self):
        return loader()


class Watched(Validated):
    """Remembers the flags of every step."""

    def __init__(self, **options):
        super().__init__(**options)
        self.flags = {}

    def training_step(self, batch, _):
        self.flags["fit"] = current_flags()
        return super().training_step(batch, _)

    def validation_step(self, batch, _):
        self.flags["sanity" if self.trainer.sanity_checking else "validate"] = current_flags()

    def test_step(self, batch):
        self.flags["test"] = current_flags()

    def predict_step(self, batch, _):
        self.flags["predict"] = current_flags()


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1_000_000)  # to count them takes a tenth of a second
    before = current_flags()
    yield
    assert current_flags() == before


def test_they_hold_in_every_loop_and_go_back_between_them(tmp_path):
    model, before = Watched(), current_flags()
    run = trainer(tmp_path, callbacks=[AccelerationFlags(attention=["math"], gc_interval=2)], epochs=1)
    for start in (
        lambda: run.fit(model, loader()),
        lambda: run.validate(model, verbose=False),
        lambda: run.test(model, loader(), verbose=False),
        lambda: run.predict(model, loader()),
        lambda: run.fit(model, loader()),
    ):
        start()
        assert current_flags() == before
    assert set(model.flags) == {"sanity", "fit", "validate", "test", "predict"}
    for inside in model.flags.values():
        assert (inside["attention"], inside["gc_enabled"]) == (["math"], False)


def test_gone_after_an_exception(tmp_path):
    model, before = Watched(fail=True), current_flags()
    with pytest.raises(RuntimeError, match="stop here"):
        trainer(tmp_path, callbacks=[AccelerationFlags(attention=["math"], gc_interval=2)]).fit(model, loader())
    assert model.flags["fit"]["attention"] == ["math"]
    assert current_flags() == before


class Attention(Net):
    """Attends, and tells which kernel its compiled block has baked in."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Attend() for _ in range(2))


class Attend(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.project(x)[None, None]
        return scaled_dot_product_attention(x, x, x)[0, 0]


@pytest.mark.parametrize("flags_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compile_bakes_in_the_kernel_of_the_flags_wherever_they_stand_in_the_list(tmp_path, flags_first):
    def fit(*, attention):
        callbacks = [AccelerationFlags(attention=attention), Compile(backend="aot_eager")]
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run = trainer(tmp_path, callbacks=callbacks if flags_first else callbacks[::-1], epochs=1)
            run.fit(Attention(), loader())
        names = {event.key for event in seen.key_averages()}
        return {FLASH, MATH} & names

    assert fit(attention=["math"]) == {MATH}
    assert fit(attention=["flash"]) == {FLASH}
    assert fit(attention=["math"]) == {MATH}
    assert fit(attention=None) == {FLASH}, "a graph of an earlier fit is not left behind"


def frozen_in_a_run(tmp_path):
    gc.unfreeze()
    if torch.cuda.is_available():
        torch.cuda.init()  # as Lightning does amid the fit; flags tell of the allocator from then on
    model, before = Watched(), current_flags()
    trainer(tmp_path, callbacks=[AccelerationFlags(gc_interval=2)], epochs=2).fit(model, loader())
    return model.flags["fit"], before, current_flags()


def test_what_it_froze_is_thawed_when_the_run_ends(fresh_process, tmp_path):
    # In which there is less to be looked through, each time.
    inside, before, after = fresh_process(frozen_in_a_run, tmp_path)
    assert (inside["gc_frozen"], before["gc_frozen"]) == (True, False)
    assert after == before


def test_what_took_effect_is_reported_from_what_is_read_back(tmp_path):
    report = {}
    model = Watched()
    model.on_train_start = lambda: report.update(applied(model.trainer.strategy).report.parts)
    declared = AccelerationFlags(tf32=True, attention=["cudnn", "math"], gc_interval=5)
    trainer(tmp_path, callbacks=[declared], epochs=1).fit(model, loader())
    part = report["AccelerationFlags"]
    assert part["asked"] == {"tf32": True, "attention": ["cudnn", "math"], "gc_interval": 5}
    assert part["no_effect"] == {"tf32": "no effect on cpu", "attention": "cudnn: no effect on cpu"}
    assert part["in_effect"]["attention"] == ["math"]
    assert part["in_effect"]["tf32_matmul"] is False
    assert part["lines"] == [
        "attention=['cudnn', 'math'], gc_interval=5",
        "tf32=True: no effect on cpu",
        "attention=['cudnn', 'math']: cudnn: no effect on cpu",
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_what_auto_chose_is_reported_in_each_run(compiled, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lightning_ups.transforms.flags._GPU_ONLY", frozenset())
    monkeypatch.setattr("lightning_ups.kernels.attention.auto._DECIDED", {})  # of other tests
    torch.compiler.reset()
    for again in (False, True):  # then the choice is made, and code compiled
        caplog.clear()
        report, model = {}, Attention()
        told = report.update
        model.on_train_end = lambda told=told, model=model: told(applied(model.trainer.strategy).report.parts)
        callbacks = [AccelerationFlags(attention="auto"), *([Compile(backend="aot_eager")] if compiled else [])]
        with caplog.at_level("INFO", "lightning.pytorch"):
            trainer(tmp_path, callbacks=callbacks, epochs=1).fit(model, loader())
        part = report["AccelerationFlags"]
        assert [choice["backend"] for choice in part["attention_chosen"]] == ["flash"]
        assert "by flash: first of the rule" in part["lines"][-1]
        assert part["lines"][-1].endswith("as chosen earlier in this process") == (compiled and again)
        assert caplog.messages.count(f"AccelerationFlags: {part['lines'][-1]}") == 1


def test_what_is_chosen_in_a_later_step_is_reported_too(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_ups.transforms.flags._GPU_ONLY", frozenset())
    monkeypatch.setattr("lightning_ups.kernels.attention.auto._DECIDED", {})  # of other tests
    report, model, resting, callback = {}, Attention(), [], AccelerationFlags(attention="auto")
    step = model.training_step

    def of_two_heads_from_the_fourth_on(batch, batch_idx):
        resting.append("on_train_batch_end" in vars(callback))
        if batch_idx > 2:
            scaled_dot_product_attention(*[torch.randn(1, 2, 8, 4)] * 3)
        return step(batch, batch_idx)

    model.training_step = of_two_heads_from_the_fourth_on
    model.on_train_end = lambda: report.update(applied(model.trainer.strategy).report.parts)
    trainer(tmp_path, callbacks=[callback], epochs=1).fit(model, loader(1))
    assert [choice["heads"] for choice in report["AccelerationFlags"]["attention_chosen"]] == [1, 2]
    assert resting == [False, *[True] * 7]


def test_what_a_named_kernel_does_is_not_told_as_a_choice_of_an_earlier_run(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_ups.transforms.flags._GPU_ONLY", frozenset({"fa4"}))
    monkeypatch.setattr("lightning_ups.kernels.attention.auto._DECIDED", {})  # of other tests
    parts = []
    for asked in ("auto", ["flash", "auto"]):
        model = Attention()
        model.on_train_end = lambda model=model: parts.append(applied(model.trainer.strategy).report.parts)
        trainer(tmp_path, callbacks=[AccelerationFlags(attention=asked)], epochs=1).fit(model, loader())
    assert "attention_chosen" in parts[0]["AccelerationFlags"]
    assert "attention_chosen" not in parts[1]["AccelerationFlags"]
    assert parts[1]["AccelerationFlags"]["lines"] == ["attention=['flash', 'auto']"]


def test_a_model_that_does_not_attend_is_told_of_after_one_that_did(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_ups.transforms.flags._GPU_ONLY", frozenset())
    monkeypatch.setattr("lightning_ups.kernels.attention.routing._CALLED", {})
    for model in (Attention(), Net()):
        parts = {}
        model.on_train_end = lambda model=model, parts=parts: parts.update(
            applied(model.trainer.strategy).report.parts["AccelerationFlags"]
        )
        trainer(tmp_path, callbacks=[AccelerationFlags(attention="auto")], epochs=1).fit(model, loader())
    assert "attention_chosen" not in parts
    assert "no effect so far" in parts["lines"][-1]


@pytest.mark.parametrize("asked", ["auto", ["flex", "flash", "math"]])
@pytest.mark.parametrize("attends", [False, True])
def test_kernels_that_nothing_asks_for_are_told_of(attends, asked, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lightning_ups.transforms.flags._GPU_ONLY", frozenset())
    monkeypatch.setattr("lightning_ups.transforms.flags.attention_kernel_error", lambda *_, **__: None)
    monkeypatch.setattr("lightning_ups.kernels.attention.routing._CALLED", {})
    report, model = {}, Attention() if attends else Watched()
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step(batch, batch_idx) if batch_idx else None  # skips the first
    model.on_train_end = lambda: report.update(applied(model.trainer.strategy).report.parts)
    with caplog.at_level("INFO", "lightning.pytorch"):
        trainer(tmp_path, callbacks=[AccelerationFlags(attention=asked)], epochs=1).fit(model, loader())
    told = [line for line in report["AccelerationFlags"]["lines"] if "no effect so far" in line]
    assert len(told) == (0 if attends else 1)
    assert [line for line in caplog.messages if "no effect so far" in line] == [
        f"AccelerationFlags: {line}" for line in told
    ]


class Dropping(Net):
    def training_step(self, batch, _):
        x = self.layers[0](batch)[None, None]
        return scaled_dot_product_attention(x, x, x, dropout_p=0.1).sum()


@pytest.mark.parametrize("asked", ["flash", ["flash"]])
def test_a_call_that_no_allowed_kernel_takes_ends_with_the_cure(asked, tmp_path):
    """Torch's flash attention on a CPU takes no dropout."""
    flags = AccelerationFlags(attention=asked)
    with pytest.raises(RuntimeError, match="No available kernel") as error:
        trainer(tmp_path, callbacks=[flags]).fit(Dropping(), loader())
    (note,) = error.value.__notes__
    assert note.startswith("AccelerationFlags(attention=['flash']) allows no other attention kernel")
    assert "attention=['flash', 'math']" in note
    more = AccelerationFlags(attention=["flash", "math"])
    trainer(tmp_path, callbacks=[more]).fit(Dropping(), loader())


def test_nothing_asked_is_nothing_said(tmp_path):
    report, model = {}, Watched()
    model.on_train_start = lambda: report.update(applied(model.trainer.strategy).report.parts)
    trainer(tmp_path, callbacks=[AccelerationFlags()], epochs=1).fit(model, loader())
    assert report["AccelerationFlags"]["lines"] == []
    assert report["AccelerationFlags"]["in_effect"]["attention"]


def test_garbage_is_collected_at_its_batches_and_sanity_checking_does_not_count(tmp_path):
    collected, model = [], Validated()

    def watch(phase, info):
        if phase == "start" and info["generation"] == 2 and model.trainer.training:
            collected.append(model.trainer.global_step)

    run = trainer(tmp_path, callbacks=[AccelerationFlags(gc_interval=3)], epochs=1, limit_val_batches=1)
    gc.callbacks.append(watch)
    try:
        run.fit(model, loader(1))
    finally:
        gc.callbacks.remove(watch)
    assert [step for step in collected if step] == [1, 3, 6]


def test_values_are_typed_for_the_command_line():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(AccelerationFlags, "flags")
    config = parser.parse_string(
        "flags: {tf32: true, attention: [cudnn, flash], expandable_segments: true, gc_interval: 50}"
    )
    assert parser.instantiate_classes(config).flags.flags.asked == {
        "tf32": True,
        "attention": ["cudnn", "flash"],
        "expandable_segments": True,
        "gc_interval": 50,
    }
    with pytest.raises(Exception, match="flsh"):
        parser.parse_string("flags: {attention: [flsh]}")


def test_late_logs_are_on_or_off():
    assert AccelerationFlags().late_logs
    assert not AccelerationFlags(late_logs=False).late_logs


def test_making_it_touches_nothing():
    def switches():
        return read_attention(), read_tf32(), torch.backends.cudnn.benchmark, gc.isenabled(), gc.get_threshold()

    before = switches()
    AccelerationFlags(tf32=True, cudnn_benchmark=True, attention=["math"], gc_interval=5)
    assert switches() == before


@pytest.mark.gpu(capability=(8, 0))
def test_all_of_them_take_effect_on_a_gpu(tmp_path):
    model = Watched()
    declared = AccelerationFlags(
        tf32=True, cudnn_benchmark=True, attention=["cudnn", "flash", "efficient", "math"], expandable_segments=True
    )
    trainer(tmp_path, callbacks=[declared], epochs=1, accelerator="gpu", devices=1).fit(model, loader())
    inside = model.flags["fit"]
    assert inside["tf32_matmul"]
    assert inside["tf32_cudnn"]
    assert inside["cudnn_benchmark"]
    assert inside["attention"] == ["cudnn", "flash", "efficient", "math"]
    assert inside["allocator"]["expandable_segments"]


def test_a_run_inside_of_a_run_ends_for_itself(tmp_path):
    flags = AccelerationFlags(gc_interval=2)

    class Outer(Net):
        def training_step(self, batch, index):
            if self.global_step == 1:
                trainer(tmp_path, callbacks=[flags], epochs=1).fit(Net(), loader(2))
                assert not gc.isenabled()
                assert flags._collection is not None
            return super().training_step(batch, index)

    trainer(tmp_path, callbacks=[flags], epochs=1).fit(Outer(), loader(2))
    assert flags._collection is None
    assert gc.isenabled()
