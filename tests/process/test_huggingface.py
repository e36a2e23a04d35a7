"""The examples with Hugging Face's Trainer and Accelerate: killed workers, nodes that go."""

import dataclasses
import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
from framework_runs import FrameworkRun, killed_and_told_to_go
from gloo_ranks import run_ranks

from hpc_elastic.errors import ConfigError

pytest.importorskip("accelerate", reason="pip install -e '.[frameworks]'")
hf = pytest.importorskip("transformers", reason="pip install -e '.[frameworks]'")
import trainer_arguments  # noqa: E402
import trainer_losses  # noqa: E402

from hpc_elastic.integrations import huggingface  # noqa: E402
from hpc_elastic.integrations.huggingface import (  # noqa: E402
    MARK,
    ElasticTrainer,
    ElasticTraining,
    newest_checkpoint,
)


@pytest.mark.long
def test_the_trainer_withstands_a_kill_and_a_node_that_goes(tmp_path):
    """Nothing is lost but what the kill cost."""
    overrides = ("epochs=4", "pause_s=0.2", "save_every_s=3")
    killed_and_told_to_go("huggingface/trainer.py", tmp_path, *overrides, num_steps=4 * 30)


@pytest.mark.long
def test_accelerate_goes_on_without_a_node(tmp_path):
    """One of two nodes is asked to leave: the other goes on from the step that both have saved."""
    overrides = ("nodes=1:2", "epochs=2", "pause_s=0.1", "save_every_s=1000")
    with FrameworkRun("huggingface/accelerated.py", tmp_path, *overrides) as run:
        run.trains(1)
        run.tell_to_go(run.tasks()[0])
        (value,) = run.values()

    assert run.lost_at_notice() == 0
    assert value["steps"] == 2 * 38
    assert "recorded and lost: 0 steps" in run.audit()


class Net(torch.nn.Module):
    """A linear model, as a Trainer takes it; its loss is the mean over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        """Return the loss."""
        return {"loss": (self.layer(x) - labels).square().mean()}


def make(
    folder: Path,
    *,
    callbacks: list | None = None,
    global_batch=8,
    made_by_trainer=False,
    set_later: dict | None = None,
    **more,
) -> ElasticTrainer:
    """Make a Trainer for three epochs of 22 samples, in this process; it saves after each step."""
    hf.set_seed(0)
    net, x = Net(), torch.randn(22, 3)
    data = [{"x": row, "labels": row.sum(0, keepdim=True)} for row in x]
    options = {
        "num_train_epochs": 3, "learning_rate": 0.1, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    args = hf.TrainingArguments(str(folder), **options | more)
    for name, value in (set_later or {}).items():
        setattr(args, name, value)
    model = {"model_init": Net} if made_by_trainer else {"model": net}
    return ElasticTrainer(
        **model, args=args, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks,
        global_batch=global_batch, period={"every_steps": 1000},
    )  # fmt: skip


def train(folder: Path, **more) -> Net:
    """Train; return the model."""
    trainer = make(folder, **more)
    trainer.train()
    return trainer.model


WAYS = {
    "at once": {"per_device_train_batch_size": 8},
    "accumulated": {"per_device_train_batch_size": 2, "dataloader_drop_last": True},
    "with a smaller last batch": {"per_device_train_batch_size": 3},
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("way", WAYS)
def test_a_training_that_goes_on_is_the_same_to_the_bit(tmp_path, way):
    """From inside of an epoch and from an epoch's last step."""
    whole = train(tmp_path / "whole", **WAYS[way])
    folders = sorted((tmp_path / "whole").glob("checkpoint-*"))
    assert len(folders) == (6 if way == "accumulated" else 9)
    for step in (1, 3, 4):
        rest = tmp_path / f"rest-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", rest / f"checkpoint-{step}")
        net = train(rest, **WAYS[way])
        assert len(list(rest.iterdir())) == len(folders) - step + 1
        assert torch.equal(whole.layer.weight, net.layer.weight), step


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("most", [1, 3, 4])
def test_accumulated_micro_batches_make_the_steps_of_the_whole_batch(tmp_path, most):
    """Also of an epoch's last, smaller batch, which has as many of them; some have weight 0."""
    whole = train(tmp_path / "whole", per_device_train_batch_size=8)
    parts = train(tmp_path / "parts", per_device_train_batch_size=most)
    torch.testing.assert_close(parts.layer.weight, whole.layer.weight)


def test_a_checkpoint_counts_once_it_is_marked(tmp_path):
    """A later one that was being written is passed over."""
    assert newest_checkpoint(tmp_path) is None
    for step, names in ((9, [MARK]), (10, [MARK]), (11, ["model.safetensors"])):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name in names:
            (tmp_path / f"checkpoint-{step}" / name).touch()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


class Noted(hf.TrainerCallback):
    """Notes what the Trainer does, in order; stops the training after a step."""

    def __init__(self, stop_after: int = 0) -> None:
        self.events: list[tuple[str, int]] = []
        self.stop_after = stop_after

    def on_step_end(self, args, state, control, **_):
        """Note a step."""
        self.events.append(("step", state.global_step))
        if state.global_step == self.stop_after:
            control.should_training_stop = True

    def on_evaluate(self, args, state, control, **_):
        """Note an evaluation."""
        self.events.append(("evaluation", state.global_step))

    def on_save(self, args, state, control, **_):
        """Note a save, before its folder is marked."""
        self.events.append(("save", state.global_step))


WITH_EVALUATION = {
    "per_device_train_batch_size": 8, "eval_strategy": "steps", "eval_steps": 1,
    "metric_for_best_model": "loss", "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0},
}  # fmt: skip
"""The evaluation of each step decides the learning rate."""

OPTIONS = {
    "loader": {
        "dataloader_num_workers": 1, "dataloader_prefetch_factor": 3,
        "dataloader_persistent_workers": True, "dataloader_multiprocessing_context": "fork",
        "dataloader_pin_memory": False,
    },
    "order": {"train_sampling_strategy": "sequential", "max_steps": 7, "data_seed": 3},
    "evaluation": WITH_EVALUATION,
    "best": WITH_EVALUATION | {"load_best_model_at_end": True, "save_total_limit": 2},
    "callbacks": {"restore_callback_states_from_checkpoint": True, "save_strategy": "epoch"},
}  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n == "order" else n for n in OPTIONS]
)
def test_arguments_hold_after_a_restart(tmp_path, name):
    """A training that stops after its fourth step and is begun again ends as the undisturbed."""
    options = {"per_device_train_batch_size": 8, **OPTIONS[name]}
    whole = make(tmp_path / "whole", **options)
    whole.train()
    first = make(tmp_path / "parts", callbacks=[Killed(4)], **options)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    rest = make(tmp_path / "parts", **options)
    rest.train()
    assert torch.equal(whole.model.layer.weight, rest.model.layer.weight)
    assert whole.state.global_step == rest.state.global_step
    assert whole.state.best_metric == rest.state.best_metric
    assert whole.state.best_global_step == rest.state.best_global_step


class Killed(hf.TrainerCallback):
    """Ends a training as a kill does, once the first save from a step on is complete."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        """End it."""
        if state.global_step >= self.step and newest_checkpoint(args.output_dir):
            raise KeyboardInterrupt


def test_the_loader_is_as_the_arguments_say(tmp_path):
    """Nothing of the Trainer's own DataLoader is dropped, the seeds of its workers included."""
    trainer = make(tmp_path, per_device_train_batch_size=8, **OPTIONS["loader"])
    loader = trainer.get_train_dataloader()._loader
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 3, True)
    assert loader.multiprocessing_context.get_start_method() == "fork"
    assert loader.worker_init_fn.func.__name__ == "seed_worker"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("more", [{}, {"max_steps": 4}], ids=["by a callback", "max_steps"])
def test_a_training_that_has_stopped_trains_no_further_step(tmp_path, monkeypatch, more):
    """Also in the middle of an epoch, if it is begun again."""
    stops = [] if more else [Noted(stop_after=4)]
    first = make(tmp_path, callbacks=stops, per_device_train_batch_size=8, **more)
    first.train()
    monkeypatch.setattr(huggingface, "_trained", set())
    noted = Noted()
    again = make(tmp_path, callbacks=[noted], per_device_train_batch_size=8, **more)
    again.train()
    assert again.state.global_step == 4
    assert noted.events == []
    assert torch.equal(first.model.layer.weight, again.model.layer.weight)


@pytest.mark.filterwarnings("default")
def test_an_evaluation_waits_for_a_save_that_is_urgent(tmp_path, monkeypatch):
    """It is made once the group has not changed, or at the restart; the training is the same."""
    whole = make(tmp_path / "whole", **WITH_EVALUATION)
    whole.train()

    urgent, parts = Noted(), tmp_path / "parts"
    monkeypatch.setattr(huggingface.reporting, "save_is_urgent", lambda step: step in (2, 3, 5))
    monkeypatch.setattr(huggingface.reporting, "mark_checkpoint", changing_at(5))
    with pytest.raises(KeyboardInterrupt):
        make(parts, callbacks=[urgent], **WITH_EVALUATION).train()
    assert urgent.events[3:6] == [("step", 2), ("save", 2), ("evaluation", 2)]
    assert urgent.events[-2:] == [("step", 5), ("save", 5)]
    rest = Noted()
    again = make(parts, callbacks=[rest], **WITH_EVALUATION)
    again.train()
    assert rest.events[:2] == [("evaluation", 5), ("step", 6)]
    assert torch.equal(whole.model.layer.weight, again.model.layer.weight)
    assert whole.state.best_global_step == again.state.best_global_step


def changing_at(last: int):
    """Stand for `mark_checkpoint` of a group that changes at a step."""

    def mark_checkpoint(*, step: int) -> None:
        if step == last:
            raise KeyboardInterrupt

    return mark_checkpoint


@pytest.mark.filterwarnings("default")
def test_there_is_always_a_complete_checkpoint(tmp_path, monkeypatch):
    """The old one is removed once the new one counts, and an incomplete one is no reason to."""
    (tmp_path / "checkpoint-99").mkdir()
    removed, remove = [], shutil.rmtree

    def note_removal(path, **options):
        removed.append((Path(path).name, newest_checkpoint(tmp_path)))
        assert not Path(path, MARK).exists(), "a folder that is half removed does not count"
        remove(path, **options)

    monkeypatch.setattr(huggingface.shutil, "rmtree", note_removal)
    make(tmp_path, per_device_train_batch_size=8, save_total_limit=1, max_steps=3).train()
    first, second, third = (str(tmp_path / f"checkpoint-{step}") for step in (1, 2, 3))
    assert removed == [("checkpoint-99", first), ("checkpoint-1", second), ("checkpoint-2", third)]


def test_a_folder_that_is_written_again_does_not_count(tmp_path):
    """The Trainer writes it in place."""
    trainer = make(tmp_path, per_device_train_batch_size=8)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / MARK).touch()
    trainer.save_model(str(tmp_path / "checkpoint-1"), _internal_call=True)
    assert newest_checkpoint(tmp_path) is None


def made(folder: Path, step: int, run: str | None = None) -> str:
    """Make the folder of a complete checkpoint."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / MARK).write_text(json.dumps({"trainer": {"run": run}}))
    return str(path)


def test_a_restart_continues_from_the_newest_checkpoint(tmp_path, monkeypatch, caplog):
    """Whatever the script gives: it gives the same at each restart."""
    out, start = tmp_path / "out", huggingface._starting_point
    outside, old = made(tmp_path / "other", 50), made(out, 1)
    (torn := out / "checkpoint-9").mkdir()
    assert start(out, None) == start(out, True) == Path(old)
    assert start(out, str(torn)) == start(out, outside) == Path(old)
    assert "checkpoint-9" in caplog.text
    assert start(out, False) is None
    assert start(tmp_path / "new", outside) == Path(outside)

    newest = made(out, 2, "this")
    assert start(out, old) == Path(old), "without a run there is no restart"
    monkeypatch.setattr(huggingface, "own_run", lambda: "this")
    for given in (None, True, False, old, outside, newest, str(torn), torn):
        assert start(out, given) == Path(newest)


@pytest.mark.filterwarnings("default")
def test_what_would_continue_from_another_checkpoint_is_refused(tmp_path, monkeypatch):
    """At the start of a run, where the files that are there are not its own."""
    start, key = huggingface._starting_point, "resume_from_checkpoint"
    (plain := tmp_path / "plain" / "checkpoint-7").mkdir(parents=True)
    for folder in (plain.parent, tmp_path):
        with pytest.raises(ConfigError, match=f"{key}.*incomplete or of another Trainer"):
            start(folder, plain)
    monkeypatch.setattr(huggingface.reporting, "run_scalars", lambda: {"round": 2.0})
    assert start(plain.parent, plain) is None, "a restart before the first checkpoint"
    monkeypatch.setattr(huggingface, "own_run", lambda: "this")
    old, _ = made(tmp_path, 1), made(tmp_path, 2)
    with pytest.raises(ConfigError, match=f"{key}.*is newer.*another output_dir"):
        start(tmp_path, old)
    with pytest.raises(ConfigError, match=f"{key}=False.*another output_dir"):
        start(tmp_path, False)


@pytest.mark.filterwarnings("default")
def test_a_second_training_needs_a_folder_of_its_own(tmp_path, caplog):
    """It would begin at the end of the first one; another learning rate is in the checkpoint."""
    options = {"per_device_train_batch_size": 8, "max_steps": 2}
    trainer = make(tmp_path / "a", **options)
    trainer.train()
    for each in (trainer, make(tmp_path / "a", **options)):
        with pytest.raises(ConfigError, match=r"output_dir.*each stage"):
            each.train()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    make(tmp_path / "b", **options, learning_rate=0.5).train()
    assert "learning_rate=0.5 has no effect" in caplog.text
    assert "the training has ended at step 2" in caplog.text
    shutil.rmtree(tmp_path / "b")
    assert make(tmp_path / "b", **options).train().global_step == 2  # as in a notebook
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    with pytest.raises(ConfigError, match=r"global_batch=4.*3 steps an epoch, and not 6"):
        make(tmp_path / "c", global_batch=4, **options).train()


@pytest.mark.filterwarnings("default")
def test_a_model_that_is_made_by_the_trainer_is_restored(tmp_path):
    """`model_init` makes it anew at each start."""
    whole = make(tmp_path / "whole", made_by_trainer=True, per_device_train_batch_size=8)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "rest" / "checkpoint-4")
    rest = make(tmp_path / "rest", made_by_trainer=True, per_device_train_batch_size=8)
    rest.train()
    assert torch.equal(whole.model.layer.weight, rest.model.layer.weight)


def test_every_argument_is_known():
    """A new release adds or removes none that is not in the table, and the tests exist."""
    fields = {field.name for field in dataclasses.fields(hf.TrainingArguments)}
    assert fields == trainer_arguments.TRAINING_ARGUMENTS.keys()
    for of, table in ((hf.Trainer, "TRAINER"), (ElasticTraining, "ELASTIC")):
        parameters = inspect.signature(of.__init__).parameters.keys() - {"self"}
        assert parameters == getattr(trainer_arguments, table).keys()
    for rows in (trainer_arguments.TRAINING_ARGUMENTS, trainer_arguments.TRAINER):
        tests = {row.test for row in rows.values() if isinstance(row, trainer_arguments.Works)}
        assert tests <= globals().keys()


@pytest.mark.filterwarnings("default")
def test_what_would_go_wrong_later_is_refused(tmp_path):
    """At the construction; the message names the argument and what to do."""

    def refused(key: str, text: str, **more) -> None:
        with pytest.raises(ConfigError, match=f"^{key}=.*{text}"):
            make(tmp_path, **{"per_device_train_batch_size": 8} | more)

    set_later = {"deepspeed", "fsdp", "parallelism_config"}
    for key, row in trainer_arguments.TRAINING_ARGUMENTS.items():
        if isinstance(row, trainer_arguments.Refused) and key not in set_later:
            refused(key, row.text, **{key: row.value})
    for key in set_later:  # whose values need packages or ranks
        row = trainer_arguments.TRAINING_ARGUMENTS[key]
        with pytest.raises(ConfigError, match=f"^{key}=.*{row.text}"):
            make(tmp_path, per_device_train_batch_size=8, set_later={key: row.value})
    with pytest.raises(ConfigError, match=r"^n_gpu=2.*one worker for each GPU"):
        make(tmp_path, per_device_train_batch_size=8, set_later={"_n_gpu": 2})
    args = hf.TrainingArguments(str(tmp_path), use_cpu=True)
    own = {name: type("Own", (ElasticTrainer,), {name: None}) for name in huggingface._ORDER}
    private = {*own, "_evaluate", "_determine_best_metric"}
    assert all(hasattr(hf.Trainer, name) for name in private), "the Trainer has renamed one"
    assert hasattr(make(tmp_path, per_device_train_batch_size=8), "_loss_shifts_labels")
    for key, cls in (own | {
        "loss_is_scaled_for_ga": type("Own", (ElasticTrainer,), {"loss_is_scaled_for_ga": True}),
        "train_dataset": ElasticTrainer,
    }).items():  # fmt: skip
        data = Stream() if key == "train_dataset" else [{}]
        with pytest.raises(ConfigError, match=f"^{key}="):
            cls(model=Net(), args=args, train_dataset=data, global_batch=8)
    with pytest.raises(ConfigError, match=r"^trial="):
        make(tmp_path, per_device_train_batch_size=8).train(trial={"learning_rate": 1})


class Stream(torch.utils.data.IterableDataset):
    """A dataset without a length."""

    def __iter__(self):
        """Yield nothing."""
        yield from ()


class Words(torch.nn.Module):
    """A language model of the script's own, with its own idea of a mean loss."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table, self.way = torch.nn.Embedding(trainer_losses.WORDS, trainer_losses.WORDS), way
        self.num_calls = 0

    def forward(self, input_ids, attention_mask, labels):
        """Return the loss."""
        self.num_calls += 1
        logits = torch.nn.functional.dropout(self.table(input_ids), 0.1, self.training)
        if self.way == "shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")
        counts = labels.ne(-100).sum(1)
        by_sample = losses.sum(1) / counts
        mean = {"samples": by_sample.mean(), "contrast": by_sample.std()}
        return {"loss": mean.get(self.way, losses.sum() / counts.sum())}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("way", ["labels", "samples", "shifted", "contrast"])
def test_a_loss_that_is_no_mean_over_labels_is_not_weighted_by_them(tmp_path, caplog, way):
    """It is refused in the first step if known, and otherwise said once."""
    args = hf.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=6, max_steps=2, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    data = trainer_losses.KINDS["causal"][1]
    trainer = ElasticTrainer(
        model=(words := Words(way)), args=args, train_dataset=data, global_batch=6
    )
    if way in ("samples", "shifted"):
        with pytest.raises(ConfigError, match=r"compute_loss=.*divided by its num_items_in_batch"):
            trainer.train()
        return
    trainer.train()
    assert words.num_calls == 3 + 2
    assert ("not the mean of its parts" in caplog.text) == (way == "contrast")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, list[float]]:
    """The parameters after trainings of one process, which takes each batch at once."""
    return trainer_losses.all_kinds(0, 1, str(tmp_path_factory.mktemp("whole")))


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_loss_is_the_mean_over_the_whole_batch(tmp_path, whole, world_size):
    """Whether it uses the number of items or not, by labels or samples, with uneven shares."""
    expected = whole | {"causal, accumulated": whole["causal, at once"]}
    for found in run_ranks(trainer_losses.all_kinds, world_size, world_size, str(tmp_path)):
        for kind in trainer_losses.KINDS:
            assert found[kind] == pytest.approx(expected[kind], rel=1e-6, abs=1e-6), kind
