"""``python -m lightning_ups`` as a process: what it costs, and what it does not load."""

import logging
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from lightning_ups import __main__ as command_line
from lightning_ups.__main__ import main


def process(*words, **options):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **options)


def test_the_help_lists_what_there_is(capsys):
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        for name in ("fit", "validate", "test", "predict", "explain", "presets"):
            assert f"\n  {name} " in out


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lightning_ups ")


def test_lines_of_torchaos_import_are_hidden(caplog):
    main(["--version"])
    logging.getLogger("torchao").warning("Failed to load /x/torchao/_C_cutlass_90a.abi3.so: Could not load it")
    logging.getLogger("torch.utils._pytree").warning("Calling register_constant() on Enum is deprecated and will be")
    logging.getLogger("torchao").warning("Skipping import of cpp extensions")
    assert "Failed" not in caplog.text
    assert "Enum" not in caplog.text
    assert "Skipping" in caplog.text


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_a_process_that_imports_torchao_prints_nothing():
    done = process("-c", "from lightning_ups.__main__ import main; main(['--version']); import torchao")
    assert done.returncode == 0, done.stderr
    assert not {"Failed", "register_constant()"} & {*done.stderr.split()}


NO_FILE = ["fit", "--config", "nofile.yaml"]


@pytest.mark.parametrize(
    "words",
    [["--help"], ["presets"], ["presets", "cpu"], ["--version"], ["nonsense"], NO_FILE, ["plan", "-c", "nofile.yaml"]],
)
def test_light_commands_load_nothing_heavy(words):
    code = (
        "import sys; from lightning_ups.__main__ import main; main(sys.argv[1:]);"
        "assert not {'torch', 'lightning', 'jsonargparse'} & {*sys.modules}"
    )
    done = process("-c", code, *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["presets"], 0), (NO_FILE, 2)])
def test_light_commands_answer_within_a_second(words, code):
    times = []
    for _ in range(3):
        start = of_children()
        assert process("-m", "lightning_ups", *words).returncode == code
        times.append(of_children() - start)
    assert min(times) < 1


@pytest.mark.parametrize(
    "words", [NO_FILE, ["--config=nofile.yaml", "explain"], ["fit", "-c", "no.yaml", *NO_FILE[1:]]]
)
def test_a_missing_file_is_refused_with_the_nearest_name(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "_load", None)
    (tmp_path / "nofiles.yaml").touch()
    (tmp_path / "no.yaml").touch()
    assert main(words) == 2
    assert "'nofile.yaml' does not exist" in (said := " ".join(capsys.readouterr().err.split()))
    assert "Did you mean 'nofiles.yaml'?" in said


@pytest.mark.parametrize("given", ["{}", "a: 1\nb: 2", "memory://run.yaml", "/dev/null", "", "--preset"])
def test_what_is_no_missing_file_is_left_to_the_command(given, monkeypatch):
    monkeypatch.setattr(command_line, "_load", lambda module: sys.exit(5))
    for words in (["--config", given], [f"--config={given}"], [f"-c={given}"]):
        with pytest.raises(SystemExit):
            main(["fit", *words])


def of_children():
    """Return how long processes that have ended computed: whatever else runs on the machine does not count."""
    spent = os.times()
    return spent.children_user + spent.children_system


def test_a_wrong_command_is_exit_code_2():
    done = process("-m", "lightning_ups", "fitt")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert "Did you mean 'fit'?" in done.stderr


@pytest.fixture
def broken_torchvision(tmp_path, monkeypatch, request):
    """A torchvision that was built for another torch, as the one that a process finds first."""
    folder = tmp_path / request.param
    (folder / "torchvision").mkdir(parents=True)
    (folder / "torchvision/__init__.py").write_text("import torch; torch.library.register_fake('torchvision::nms')(id)")
    (folder / "torchvision-0.1.dist-info").mkdir()
    (folder / "torchvision-0.1.dist-info/METADATA").write_text("Name: torchvision\nVersion: 0.1\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.getcwd()]))


@pytest.mark.parametrize(
    ("broken_torchvision", "command"), [("site-packages", "fit"), ("vision", "plan")], indirect=["broken_torchvision"]
)
def test_a_package_below_lightning_that_does_not_load_is_named(broken_torchvision, command):
    done = process("-m", "lightning_ups", command, "--trainer.max_steps", "1")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert said.startswith("error: torchvision does not load: RuntimeError: ")
    assert "pip uninstall torchvision" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("broken_torchvision", ["vision"], indirect=True)
def test_doctor_names_it_too(broken_torchvision):
    done = process("-m", "lightning_ups", "doctor")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  lightning ")]
    assert "RuntimeError: operator torchvision::nms does not exist" in line
    assert "pip uninstall torchvision" in line
    assert "pip install 'lightning" not in line


def test_debug_keeps_the_exit_code(capsys):
    assert main(["presets", "h10", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].endswith("Did you mean 'h100'?")


@pytest.fixture
def no_ranks(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    "ranks",
    [
        {"LOCAL_RANK": "3"},
        {"SLURM_PROCID": "3"},
        {"RANK": "3", "LOCAL_RANK": "0"},
        {"LOCAL_RANK": "3", "SLURM_PROCID": "0"},
    ],
)
def test_other_ranks_say_it_in_one_line(capsys, monkeypatch, ranks):
    for name, rank in ranks.items():
        monkeypatch.setenv(name, rank)
    assert main(["presets", "zebra"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[rank 3] error: ")


def test_an_error_that_is_not_ours_is_raised(monkeypatch):
    monkeypatch.setattr(command_line, "_run", lambda words: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        main([])


def test_an_interruption(monkeypatch, capsys):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_run", interrupt)
    assert main([]) == 130
    assert capsys.readouterr().err.splitlines() == ["Interrupted."]


def test_an_interruption_that_lightning_has_handled(monkeypatch):
    def interrupt(words):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    monkeypatch.setattr(command_line, "_run", interrupt)
    assert main([]) == 130


def test_a_console_script_finds_modules_where_it_runs(tmp_path):
    # `python -m` looks there by itself; a script of the environment does not.
    (tmp_path / "here.py").write_text("")
    code = "import sys; sys.path.remove(''); from lightning_ups.__main__ import main; main(['--version']); import here"
    assert process("-c", code, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["presets"], ["--help"]])
def test_output_that_no_one_reads_is_no_traceback(words, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ran = subprocess.run(
        [sys.executable, "-m", "lightning_ups", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=environment,
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, "")


def test_a_pipe_of_the_users_that_breaks_keeps_its_traceback(monkeypatch):
    def write(words):
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr(command_line, "_run", write)
    with pytest.raises(BrokenPipeError, match="of a worker"):
        main([])
