"""``hydra/sweeper=elastic_optuna`` on a real Slurm."""

import pytest
from sweeps import SLOWLY, eventually

optuna = pytest.importorskip("optuna")


@pytest.mark.long
def test_a_preempted_trial_goes_on_in_the_study(sweep):
    """Its node is taken; it continues at its checkpoint, and the study has one trial for it."""
    s = sweep(
        "hydra/sweeper=elastic_optuna", "seed=range(0,9)", "nodes=1", *SLOWLY,
        "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=2", "hydra.sweeper.direction=maximize",
    )  # fmt: skip
    eventually(lambda: s.events("first_step"), "the first trial trains")
    (s.run() / "preempt" / s.events("round")[-1]["members"][0]["host"]).touch()
    eventually(lambda: len(s.events("first_step")) == 2, "it trains again")
    output = s.output()
    assert s.process.returncode == 0, output
    assert s.events("first_step")[1]["restored"], "it has loaded a checkpoint"
    file = optuna.storages.journal.JournalFileBackend(str(s.folder / "optuna.journal"))
    study = optuna.load_study(study_name="train", storage=optuna.storages.JournalStorage(file))
    assert [(t.state.name, t.value) for t in study.trials] == [
        ("COMPLETE", s.value(number)) for number in range(3)
    ]
