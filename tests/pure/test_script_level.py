"""The level that the doctor expects of a script, by reading it."""

from pathlib import Path

import pytest

from hpc_elastic.doctor.findings import Verdict
from hpc_elastic.doctor.script_level import check_script

TESTS = Path(__file__).parents[1]
LIGHTNING = "import lightning.pytorch as pl\npl.Trainer({})\n"
HUGGING_FACE = "from transformers import Trainer, TrainingArguments\nTrainer(TrainingArguments({}))"


@pytest.mark.parametrize(
    "script",
    [
        "unchanged/lightning_cli.py", "unchanged/hf_trainer.py",
        "../examples/conversions/before/lightning_ddp.py",
        "../examples/conversions/before/trainer.py",
    ],
)  # fmt: skip
def test_an_unchanged_script_would_be_exact(script):
    """Those that runs show to be exact."""
    finding = check_script((TESTS / script).read_text(), script)
    assert finding.verdict is Verdict.OK and "would be level 3" in finding.found


@pytest.mark.parametrize(
    "script",
    [
        "unchanged/plain_main.py", "unchanged/plain_module.py", "unchanged/plain_methods.py",
        "../examples/conversions/before/ddp.py", "../examples/conversions/before/hydra_ddp.py",
    ],
)  # fmt: skip
def test_a_plain_loop_would_lose_no_step(script):
    """Those that runs show to go on inside of an epoch."""
    finding = check_script((TESTS / script).read_text(), script)
    assert finding.verdict is Verdict.OK and "would be level 2" in finding.found


@pytest.mark.parametrize(
    ("source", "found", "remedy"),
    [
        ("import torch\ntorch.load('x')", "no loop of it", "docs/howto/convert.md"),
        ("class A(IterableDataset): pass", "it uses IterableDataset", "docs/howto/convert.md"),
        ("from torch.distributed.fsdp import fully_shard", "it uses fully_shard", ""),
        (LIGHTNING.format("accumulate_grad_batches=4"), "accumulate_grad_batches=4 in line 2", "1"),
        (LIGHTNING.format("strategy='deepspeed_stage_2'"), "strategy='deepspeed_stage_2'", "ddp"),
        (LIGHTNING.format("") + "class A(IterableDataset): pass", "IterableDataset in line 3", ""),
        (LIGHTNING.format("") + "def f(self, dataloader_iter): pass", "dataloader_iter", "batch"),
        (HUGGING_FACE.format("enable_jit_checkpoint=True"), "enable_jit_checkpoint=True", "leave"),
        ("def", "cannot be read", "mend"),
    ],
)
def test_what_would_not_be_exact_is_named_with_its_remedy(source, found, remedy):
    """And with its line."""
    finding = check_script(source, "train.py")
    assert finding.verdict is Verdict.WARN
    assert found in finding.found and remedy in finding.remedy


@pytest.mark.parametrize(
    "source",
    [
        LIGHTNING.format("accumulate_grad_batches=1, strategy='ddp'"),
        LIGHTNING.format("accumulate_grad_batches=cfg.steps"),
        HUGGING_FACE.format("gradient_accumulation_steps=4"),
        HUGGING_FACE.format("enable_jit_checkpoint=False, fsdp=''"),
        "from hpc_elastic import ElasticSampler",
        "import pytorch_lightning as pl\npl.Trainer()",
    ],
)
def test_what_changes_nothing_is_no_finding(source):
    """What a config decides is not seen."""
    assert check_script(source, "train.py").verdict is Verdict.OK


def test_what_a_restart_would_continue_from_is_in_the_finding():
    """The option of the script; or the setting, where none is known."""
    script = "unchanged/own_resume.py"
    finding = check_script((TESTS / script).read_text(), script)
    assert "; a restart would give --resume its newest checkpoint" in finding.found
    assert "resume_args" not in finding.remedy
    assert "launcher.resume_args" in check_script("import torch", "x.py").remedy
