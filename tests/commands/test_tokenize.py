import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_ups.commands import tokenize
from lightning_ups.data.token_folder import TokenFolder
from tests.token_files import jsonl

pytest.importorskip("tokenizers")
ROOT = Path(__file__).parent.parent.parent


def texts(count, *, length=50, seed=0):
    source = random.Random(seed)
    return [" ".join(f"w{source.randrange(60)}" for _ in range(source.randint(1, length))) for _ in range(count)]


def words(tmp_path, source, output, *options):
    return ["tokenize", "--source", source, "--tokenizer", "bytes", "--output", str(tmp_path / output), *options]


def said(outcome):
    return " ".join(outcome.err.split())


def content(path):
    return {each.name: each.read_bytes() for each in path.glob("*.bin")}


def test_the_folder_has_the_documents_in_order(ups, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", texts(300))
    outcome = ups(*words(tmp_path, source, "out", "--workers", "1"))
    assert outcome.code == 0, said(outcome)
    folder = TokenFolder(tmp_path / "out")
    assert f"{len(folder.tokens):,} tokens of 300 documents" in outcome.out
    tokenizer = folder.tokenizer()
    for start, length, text in zip(folder.starts, folder.lengths, texts(300), strict=True):
        assert tokenizer.decode(folder.tokens[start : start + length].tolist()) == text
    again = ups(*words(tmp_path, source, "out", "--workers", "1"))
    assert again.out == outcome.out, "a complete folder is left as it is"
    refused = ups(*words(tmp_path, source, "out", "--eos", "none"))
    assert refused.code == 2
    assert "end 256 -> " in said(refused)


def test_the_bytes_depend_neither_on_processes_nor_on_parts(ups, tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", texts(300))
    ups(*words(tmp_path, source, "one", "--workers", "1"))
    monkeypatch.setattr(tokenize, "_PART_BYTES", 5000)
    assert ups(*words(tmp_path, source, "two", "--workers", "2")).code == 0
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_an_error_in_a_process_is_a_line_and_what_was_done_is_kept(ups, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "_PART_BYTES", 2000)
    source = jsonl(tmp_path / "a.jsonl", texts(100))
    with open(source, "a") as file:
        file.write('{"body": "x"}\n')
    outcome = ups(*words(tmp_path, source, "out", "--workers", "2"))
    assert outcome.code == 2
    assert "no field 'text'" in said(outcome)
    assert "Run the same command again" in said(outcome)
    assert (tmp_path / "out" / "progress.json").exists()


@pytest.mark.slow
def test_after_a_wrong_option_the_right_one_may_follow(ups, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    wrong = ups(*words(tmp_path, tmp_path / "a.jsonl", "out", "--field", "txt"))
    assert wrong.code == 2
    assert "to continue" not in wrong.err
    right = ups(*words(tmp_path, tmp_path / "a.jsonl", "out"))
    assert right.code == 0, right.err


def test_a_killed_command_continues_with_the_same_bytes(ups, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", texts(9000))
    assert ups(*words(tmp_path, source, "whole", "--workers", "1")).code == 0
    code = (
        "import sys, time; from lightning_ups.commands import tokenize as t; t._PART_BYTES = 30_000; t._COMMIT_S = 0\n"
        "from lightning_ups.data.token_folder import TokenWriter as w; append = w.append\n"
        "w.append = lambda *given: (append(*given), time.sleep(0.1))\n"  # so that there is time to kill it
        "from lightning_ups.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = [sys.executable, "-c", code, *words(tmp_path, source, "cut", "--workers", "2")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    progress, before = tmp_path / "cut" / "progress.json", b""
    for how in (signal.SIGINT, signal.SIGKILL):
        options = {"env": environment, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        process = subprocess.Popen(arguments, **options)
        until(lambda before=before: progress.exists() and progress.read_bytes() != before)
        process.send_signal(how)
        _, error = process.communicate(timeout=60)
        until(lambda group=process.pid: not group_lives(group))  # its processes end with it
        assert not (tmp_path / "cut" / "tokens.json").exists()
        before = progress.read_bytes()
        if how is signal.SIGINT:
            assert process.returncode == 130, error
            assert "Run the same command again to continue" in error
            assert "Traceback" not in error
    assert "part_bytes" in said(ups(*words(tmp_path, source, "cut"))), "parts of another size are not continued"
    subprocess.run(arguments, env=environment, check=True, capture_output=True)
    assert content(tmp_path / "whole") == content(tmp_path / "cut")


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_wrong_options_are_refused(ups, tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ["a"])
    assert "--workers 0" in said(ups(*words(tmp_path, source, "out", "--workers", "0")))
    assert "does not exist" in said(ups(*words(tmp_path, str(tmp_path / "b"), "out")))


def test_a_separator_may_be_written_as_an_escape(ups, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    ups(*words(tmp_path, str(tmp_path / "a.txt"), "out", "--workers", "1", "--separator", r"\n\n"))
    assert len(TokenFolder(tmp_path / "out").lengths) == 3
