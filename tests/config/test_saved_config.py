import yaml

from tests.command import assert_short, run


def test_no_file_of_the_users_is_overwritten(ups, folder):
    # Without a logger, what is written lies in the folder of the command, where a config.yaml is probably the user's.
    text = "# mine\n" + yaml.safe_dump(run(trainer={"logger": False, "enable_checkpointing": False}))
    (folder / "config.yaml").write_text(text)
    for _ in range(2):
        assert ups("fit", "--config", "config.yaml").code == 0
    assert (folder / "config.yaml").read_text() == text
    assert {path.name for path in folder.glob("config*")} == {"config.yaml", "config-2.yaml", "config-3.yaml"}
    assert yaml.safe_load((folder / "config-2.yaml").read_text())["trainer"]["logger"] is False


def test_a_logger_that_has_no_folder(ups, folder):
    done = ups("fit", tree=run(trainer={"logger": {"class_path": "tests.cli_toys.Nowhere"}}))
    assert done.code == 0, done.err
    assert (folder / "nowhere" / "run-1" / "config.yaml").exists()
    assert "--config nowhere/run-1/config.yaml" in done.out


def test_a_folder_that_cannot_be_written(ups, folder):
    (folder / "file").touch()
    done = ups("fit", "--trainer.default_root_dir", "file", tree=run())
    assert_short(done, "file/lightning_logs", "trainer.default_root_dir")
    done = ups("fit", "--trainer.default_root_dir", "file", "--trainer.logger", "false", tree=run())
    assert_short(done, "file is not writable", "trainer.default_root_dir")


def test_without_a_fit_a_folder_that_cannot_be_written_is_no_fault(ups, folder):
    (folder / "file").touch()
    words = ("--trainer.default_root_dir=file", "--trainer.logger=false", "--trainer.limit_val_batches=1")
    done = ups("validate", *words, tree=run())
    assert done.code == 0, done.err
    assert len([line for line in done.err.splitlines() if "config.yaml" in line]) == 1
