"""Training frameworks that own the loop, under our agent: one module each, imported by the user.

    from hpc_elastic.integrations.lightning import ElasticCheckpoint, ElasticLoader, world
    from hpc_elastic.integrations.huggingface import ElasticTrainer

A framework calls us where a script of its user's own would ask us: after a step (`report`,
`should_checkpoint`), when it draws a batch (`loader`), and when a checkpoint of its own format is
complete. What its user still sees is the framework's. The frameworks are no dependencies
of this package: a module that misses its own says what to install.

Accelerate needs no module: the loop is the user's and has what stands in train.py
(examples/huggingface/accelerated.py).
"""
