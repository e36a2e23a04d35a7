"""Restarts and goodput for TensorBoard, W&B and MLflow."""

from unittest.mock import Mock

import pytest

import hpc_elastic
from hpc_elastic.worker import reporting, shared_page
from hpc_elastic.worker.reporting import run_scalars
from hpc_elastic.worker.shared_page import SharedPage


@pytest.fixture
def in_a_run(tmp_path, monkeypatch) -> SharedPage:
    """This process is rank 0 of a run, as its agent sees it."""
    page = SharedPage.create(tmp_path, 0)
    monkeypatch.setattr(reporting, "_reporter", reporting._Reporter())
    for name, value in {
        shared_page.DIRECTORY_VARIABLE: str(tmp_path), "LOCAL_RANK": "0", "RANK": "0",
        "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2", "HPC_ELASTIC_ROUND": "5",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return page


def test_goodput_is_there_once_the_agent_has_told_it(in_a_run):
    """The rest at once."""
    assert run_scalars() == {"restarts": 2.0, "round": 5.0, "world_size": 4.0}
    in_a_run.set_goodput(0.75)
    assert run_scalars()["goodput"] == 0.75


def test_each_kind_of_writer_gets_them(in_a_run):
    """Under names of their own."""
    board, wandb, mlflow = (Mock(spec=[name]) for name in ("add_scalar", "log", "log_metrics"))
    for writer in (board, wandb, mlflow):
        hpc_elastic.log_run_metrics(writer, 7)
    board.add_scalar.assert_any_call("hpc_elastic/restarts", 2.0, 7)
    for log in (wandb.log, mlflow.log_metrics):
        (values,) = log.call_args.args
        assert values["hpc_elastic/world_size"] == 4.0 and log.call_args.kwargs == {"step": 7}


def test_a_step_that_is_no_whole_number_writes_nothing(in_a_run, caplog):
    """And says so, once; one that is whole is handed on as such."""
    board = Mock(spec=["add_scalar"])
    for step in (7.5, None, "7"):
        hpc_elastic.log_run_metrics(board, step)
    board.add_scalar.assert_not_called()
    assert len(caplog.records) == 1 and "give a whole number" in caplog.text
    hpc_elastic.log_run_metrics(board, 7.0)
    assert type(board.add_scalar.call_args.args[2]) is int


def test_other_ranks_and_other_programs_write_nothing(in_a_run, monkeypatch):
    """One rank does for all; outside a run there is nothing to tell."""
    board = Mock(spec=["add_scalar"])
    monkeypatch.setenv("RANK", "3")
    hpc_elastic.log_run_metrics(board, 7)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(shared_page.DIRECTORY_VARIABLE)
    monkeypatch.setattr(reporting, "_reporter", reporting._Reporter())
    hpc_elastic.log_run_metrics(board, 7)
    board.add_scalar.assert_not_called()


def test_what_is_no_writer_is_refused(in_a_run):
    """With what is expected."""
    with pytest.raises(TypeError, match="add_scalar"):
        hpc_elastic.log_run_metrics(object(), 7)
