"""Integrations of training frameworks that own the loop: one module each, imported by the user.

    from hpc_elastic.integrations.lightning import ElasticCheckpoint, ElasticLoader, world
    from hpc_elastic.integrations.huggingface import ElasticTrainer

The framework calls a module where a script of the user's own would call this package: after a step
(`report`, `should_checkpoint`), when it draws a batch (`loader`), and when a checkpoint in its own
format is complete. Everything else that the user sees is the framework's. The frameworks are no
dependencies of this package: an import without its framework raises an error with the command that
installs it.

Experiment trackers have a module each too (`tracking` is what they share):

    from hpc_elastic.integrations.wandb import init
    from hpc_elastic.integrations.mlflow import start_run
    from hpc_elastic.integrations.tensorboard import SummaryWriter

A plain loop of an unchanged script needs no import: a worker installs `plain` by itself.

Accelerate needs no module: the loop is the user's, as in train.py
(examples/huggingface/accelerated.py). `submitit` has an elastic run's task for users of submitit.
"""
