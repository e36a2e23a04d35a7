"""The generator of the pages of the Python API: docstrings and signatures as Markdown.

A page is a text with lines ``::: name``, each replaced by what the code says about that name.
Griffe reads the code without importing it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe

from hpc_elastic import errors

_ROOT = Path(__file__).parents[1]
_DISTRIBUTIONS = ("hpc_elastic_testing", "hpc_elastic_watch", "slurm_sandbox")
_WIDTH = 88
_OPTIONS = {"returns_named_value": False, "returns_multiple_items": False}


def api_pages() -> dict[str, str]:
    """Return the text of each page below reference/api, by its name."""
    pages = {page: "\n".join(_filled(page, text)) for page, text in _TEXTS.items()}
    pages["index.md"] = _INDEX + "\n".join(_index_row(page, text) for page, text in _TEXTS.items())
    return {page: re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for page, text in pages.items()}


def _index_row(page: str, text: str) -> str:
    title = text.partition("\n")[0].removeprefix("# ")
    paths = [path for path, _ in _NAME.findall(text) if not _target(path).is_module]
    names = [path.rpartition(".")[2] for path in paths]
    links = ", ".join(f"[`{name}`]({page}#{_anchor(name)})" for name in names)
    return f"| [{title}]({page}) | {links} |"


def _filled(page: str, text: str) -> Iterator[str]:
    """Yield the lines of a page, with the description of each name in its place."""
    for line in text.splitlines():
        if named := _NAME.match(line):
            yield from _described(page, named[1])
        else:
            yield line


@functools.cache
def _modules() -> griffe.ModulesCollection:
    folders = [_ROOT, *(_ROOT / "tools" / name for name in _DISTRIBUTIONS)]
    loader = griffe.GriffeLoader(search_paths=folders)
    for package in (*_DISTRIBUTIONS, "hpc_elastic"):
        loader.load(package)
    loader.resolve_aliases()
    return loader.modules_collection


@functools.cache
def _places() -> dict[str, str]:
    """Return the page and anchor of each name that a page has, without its modules."""
    found: dict[str, str] = {}
    for page, text in _TEXTS.items():
        for path, _ in _NAME.findall(text):
            name, described = path.rpartition(".")[2], _target(path)
            if described.is_module:
                continue
            for shown in (name, *(f"{name}.{member}" for member in described.members)):
                found.setdefault(shown, f"{page}#{_anchor(name)}")
            for method in _methods(path):
                found[f"{name}.{method.name}"] = f"{page}#{_anchor(f'{name}.{method.name}')}"
    return found


def _target(path: str) -> griffe.Object:
    """Return what a name stands for, wherever it is defined."""
    found = _modules()[path]
    assert isinstance(found, griffe.Object | griffe.Alias)
    return found.final_target if isinstance(found, griffe.Alias) else found


def _anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def _described(page: str, path: str) -> Iterator[str]:
    """Yield the lines about a name, and about the methods of a class; of a module, its text."""
    name = path.rpartition(".")[2]
    if (module := _target(path)).is_module and module.docstring:
        yield from (f"{part}\n" for part in _paragraphs(page, module.docstring.value, name))
        return
    yield f"### {name}\n"
    yield from _entry(page, _target(path), name, name)
    for method in _methods(path):
        heading = f"{name}.{method.name}"
        yield f"#### {heading}\n"
        yield from _entry(page, method, heading, name)


def _methods(path: str) -> list[griffe.Function]:
    """Return the methods that the page of a class describes: public, with a docstring."""
    chosen = {path: only for text in _TEXTS.values() for path, only in _NAME.findall(text)}[path]
    found = _target(path)
    members = found.members.values() if found.is_class else ()
    methods = [m for m in members if isinstance(m, griffe.Function)]
    documented = [m for m in methods if m.docstring and not m.name.startswith("_")]
    return [m for m in documented if not chosen or m.name in chosen.split()]


def _entry(page: str, found: griffe.Object, heading: str, owner: str) -> Iterator[str]:
    yield f"```py\n{_signature(found, heading)}\n```\n"
    documented: list[griffe.Object | griffe.Alias] = [found]
    if found.is_class and "__init__" in found.members:
        documented.append(found.members["__init__"])
    for docstring in (part.docstring for part in documented if part.docstring):
        for section in docstring.parse("google", **_OPTIONS):
            yield from _section(page, section, owner)
    attributes = [m for m in found.members.values() if isinstance(m, griffe.Attribute)]
    properties = [m for m in attributes if found.is_class and m.docstring and m.is_public]
    if properties:
        yield "**Properties**\n"
    for member in properties:
        assert member.docstring
        first, *others = _paragraphs(page, member.docstring.value, owner)
        kind = f" (`{member.annotation}`)" if member.annotation else ""
        yield f"- `{member.name}`{kind}: {first}"
        yield from (f"\n  {other}" for other in others)
    yield ""


def _section(page: str, section: griffe.DocstringSection, owner: str) -> Iterator[str]:
    if section.kind is griffe.DocstringSectionKind.text:
        for paragraph in _paragraphs(page, section.value, owner):
            yield f"{paragraph}\n"
        return
    yield f"**{_TITLES[section.kind]}**\n"
    for item in section.value:
        name = f"`{item.name}`" if getattr(item, "name", "") else ""
        if section.kind is griffe.DocstringSectionKind.raises:
            kinds = str(item.annotation).strip("()").split(", ")
            name = _linked(page, " or ".join(f"`{kind}`" for kind in kinds), owner)
        first, *others = _paragraphs(page, item.description, owner)
        yield f"- {name}: {first}" if name else first
        yield from (f"\n  {other}" for other in others)
    yield ""


_TITLES = {
    griffe.DocstringSectionKind.parameters: "Arguments",
    griffe.DocstringSectionKind.attributes: "Attributes",
    griffe.DocstringSectionKind.returns: "Returns",
    griffe.DocstringSectionKind.yields: "Yields",
    griffe.DocstringSectionKind.raises: "Raises",
}


def _paragraphs(page: str, text: str, owner: str) -> list[str]:
    """Return the paragraphs, lists and indented examples of a docstring as Markdown."""
    found: list[str] = []
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    for is_code, together in itertools.groupby(blocks, lambda block: block.startswith("    ")):
        if is_code:
            code = textwrap.dedent("\n\n".join(together))
            found.append(f"```{_language(code)}\n{code}\n```")
            continue
        for block in together:
            items = re.split(r"\n(?=- )", block)
            joined = "\n".join(" ".join(item.split()) for item in items)
            found.append(_linked(page, joined.replace("``", "`"), owner))
    return found


def _language(code: str) -> str:
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "py"


def _linked(page: str, text: str, owner: str) -> str:
    """Make links of the names that a page has."""

    def link(match: re.Match[str]) -> str:
        name = match[1].removeprefix("hpc_elastic.")
        for candidate in (f"{owner}.{name}", name):
            if candidate != owner and (place := _places().get(candidate)):
                return f"[{match[0]}]({place.removeprefix(page)})"
        return match[0]

    return re.sub(r"`([\w.]+)`", link, text)


def _signature(found: griffe.Object, heading: str) -> str:
    """Return how a name is called; of an error, what it is a kind of."""
    if isinstance(found, griffe.Class):
        name, bases = f"class {heading}", ", ".join(str(base) for base in found.bases)
        if "Exception" in bases or any(kind.name == "HpcElasticError" for kind in found.mro()):
            return f"{name}({bases})"
        parameters, returns = found.parameters, ""
    else:
        assert isinstance(found, griffe.Function)
        name, parameters = heading, found.parameters
        returns = f" -> {found.returns}" if found.returns else ""
    shown = list(_parameters(parameters, found.module))
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {parameter}," for parameter in shown), f"){returns}"])


_ERRORS = tuple(name for name in vars(errors) if name.endswith("Error"))


def _parameters(parameters: griffe.Parameters, module: griffe.Module) -> Iterator[str]:
    """Yield each parameter as it is written, with the marks between them."""
    members = module.members.items()
    private = {n: m for n, m in members if n.startswith("_") and isinstance(m, griffe.Attribute)}
    kinds = griffe.ParameterKind
    stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}
    is_marked = False
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is kinds.keyword_only and not is_marked:
            yield "*"
        is_marked = is_marked or parameter.kind in (kinds.keyword_only, kinds.var_positional)
        text = stars.get(parameter.kind or kinds.keyword_only, "") + parameter.name
        text += f": {parameter.annotation}" if parameter.annotation else ""
        default = None if parameter.kind in stars else parameter.default
        if constant := private.get(str(default)):
            default = constant.value
        between = " = " if parameter.annotation else "="
        yield text + (f"{between}{default}" if default is not None else "")


_INDEX = """# Python API

These pages list the names that a training script, a program or a test uses. Everything here is typed. Names that are not here are private and may change.

```{toctree}
:hidden:

script
launch
data
ft
frameworks
errors
testing
```

<!-- Written by `python docs/generate.py` from the docstrings of hpc_elastic. -->

| page | names |
|---|---|
"""  # noqa: E501

_SCRIPT = """# In a training script

Import these names from `hpc_elastic`. [Checkpoints](../../howto/checkpoints.md) shows their use.

<!-- Written by `python docs/generate.py` from the docstrings of hpc_elastic. -->

## When to save, when to leave

::: hpc_elastic.should_checkpoint
::: hpc_elastic.mark_checkpoint
::: hpc_elastic.preemption_deadline
::: hpc_elastic.release_node

## Checkpoints

::: hpc_elastic.Checkpointer
::: hpc_elastic.CheckpointOptions
::: hpc_elastic.MemoryTier
::: hpc_elastic.follow_checkpoints
::: hpc_elastic.check_fence

## Progress and metrics

::: hpc_elastic.worker.reporting.report
::: hpc_elastic.log_run_metrics
"""

_LAUNCH = """# Start runs from a program

Import these names from `hpc_elastic`. A function of yours runs on elastic nodes, and its return values come back.

<!-- Written by `python docs/generate.py` from the docstrings of hpc_elastic. -->

## Wait for a run

::: hpc_elastic.launch
::: hpc_elastic.LaunchResult

## Results without waiting

`launch(..., wait=False)` returns a `Run`. A `Run` of an earlier program, or of a Hydra script, is `Run("path/of/its/directory")`:

```python
run = launch(train, 0.1, launcher="slurm", nodes="1:4", wait=False)
print(run.status())  # queued
try:
    print(run.result(timeout=3600)[0])
except TimeoutError:
    run.cancel()  # saves a checkpoint
    run.resume("nodes=8")  # continues from it
```

With `launcher="local"`, a run ends with the program that has submitted or resumed it; in Slurm it continues.

::: hpc_elastic.Run

`ElasticExecutor` is a `concurrent.futures.Executor`. A future has the return value of rank 0; `future.run.result()` has those of all ranks:

```python
from concurrent.futures import as_completed

with ElasticExecutor(launcher="slurm", partition="gpu", nodes="1:4") as executor:
    futures = executor.map_array(train, [0.1, 0.01, 0.001])  # one job array
    for future in as_completed(futures):
        print(future.run.run_dir, future.result())
```

A program that is itself the script of the runs needs the guard `if __name__ == "__main__":` around this.

::: hpc_elastic.ElasticExecutor
::: hpc_elastic.api.RunFuture: run running result cancel
"""  # noqa: E501

_DATA = """# Data

A sampler and a stream that give each sample once an epoch, for any number of workers. [Exactness](../../explanation/exactness.md) states what they promise; [Streams](../../howto/streams.md) shows the second.

<!-- Written by `python docs/generate.py` from the docstrings of hpc_elastic.data. -->

::: hpc_elastic.data

## Data with an index

::: hpc_elastic.data.ElasticSampler
::: hpc_elastic.data.GlobalBatch

## Data that can only be read sequentially

::: hpc_elastic.data.ElasticStream: batches
::: hpc_elastic.data.count_samples

## The same bits on any number of nodes

::: hpc_elastic.data.deterministic.deterministic_allreduce
"""  # noqa: E501

_FT = """# Per-step fault tolerance

Import these names from `hpc_elastic.ft`. See [how to use it](../../howto/fault-tolerance.md), [how it works](../../explanation/fault-tolerance.md), and [what differs from torchft](../torchft.md).

<!-- Written by `python docs/generate.py` from the docstrings of hpc_elastic.ft. -->

## The loop

::: hpc_elastic.ft.manager

::: hpc_elastic.ft.Manager
::: hpc_elastic.ft.WorldSizeMode
::: hpc_elastic.ft.DistributedDataParallel
::: hpc_elastic.ft.PureDistributedDataParallel
::: hpc_elastic.ft.OptimizerWrapper
::: hpc_elastic.ft.DistributedSampler
::: hpc_elastic.ft.LeftQuorumError
::: hpc_elastic.ft.ExceptionWithTraceback

`Optimizer` is another name of `OptimizerWrapper`.

## Fewer averages

::: hpc_elastic.ft.LocalSGD
::: hpc_elastic.ft.DiLoCo

## Process groups

::: hpc_elastic.ft.ProcessGroup
::: hpc_elastic.ft.ProcessGroupGloo
::: hpc_elastic.ft.ProcessGroupNCCL
::: hpc_elastic.ft.ProcessGroupBabyGloo
::: hpc_elastic.ft.ProcessGroupBabyNCCL
::: hpc_elastic.ft.ManagedProcessGroup
::: hpc_elastic.ft.ErrorSwallowingProcessGroupWrapper
::: hpc_elastic.ft.ProcessGroupDummy

## Healing from peers

::: hpc_elastic.ft.CheckpointTransport
::: hpc_elastic.ft.HTTPTransport
::: hpc_elastic.ft.checkpointing.pg_transport.PGTransport
::: hpc_elastic.ft.checkpointing.HealError
::: hpc_elastic.ft.checkpointing.UnusableStateError
::: hpc_elastic.ft.checkpointing.HealTimeoutError

## A lighthouse, for training without a run

::: hpc_elastic.ft.coordination.LighthouseServer

## Islands

See [how to use them](../../howto/islands.md).

::: hpc_elastic.ft.IslandDiLoCo
::: hpc_elastic.ft.RoundPolicy
::: hpc_elastic.ft.load_global_parameters
::: hpc_elastic.ft.DivergedIslandError
::: hpc_elastic.ft.IslandTimeoutError
::: hpc_elastic.ft.OuterRound
::: hpc_elastic.ft.ContributionHead
"""  # noqa: E501

_FRAMEWORKS = """# Frameworks and trackers

One module each, which needs the framework that it is named after.

<!-- Written by `python docs/generate.py` from the docstrings of hpc_elastic.integrations. -->

## Lightning

`hpc_elastic.integrations.lightning`; see [how to use it](../../howto/lightning.md).

::: hpc_elastic.integrations.lightning.ElasticCheckpoint: newest
::: hpc_elastic.integrations.lightning.ElasticLoader
::: hpc_elastic.integrations.lightning.world

## Hugging Face

`hpc_elastic.integrations.huggingface`; see [how to use it](../../howto/huggingface.md).

::: hpc_elastic.integrations.huggingface.ElasticTraining: none
::: hpc_elastic.integrations.huggingface.ElasticTrainer
::: hpc_elastic.integrations.huggingface.newest_checkpoint

## submitit

`hpc_elastic.integrations.submitit`; see [how to use it](../../howto/from-submitit.md).

::: hpc_elastic.integrations.submitit.ElasticTask: of

## Trackers

`hpc_elastic.integrations.wandb`, `.mlflow` and `.tensorboard`; see [how to use them](../../howto/trackers.md).

::: hpc_elastic.integrations.wandb.init
::: hpc_elastic.integrations.wandb.WandbRun
::: hpc_elastic.integrations.mlflow.start_run
::: hpc_elastic.integrations.mlflow.MlflowRun
::: hpc_elastic.integrations.tensorboard.SummaryWriter
"""  # noqa: E501

_ERRORS_PAGE = """# Errors

Import these names from `hpc_elastic.errors`. Each has an attribute `remedy`, which says what to do. [Commands](../cli.md#errors-with---json) lists the remedies.

<!-- Written by `python docs/generate.py` from the docstrings of hpc_elastic.errors. -->

## The tree

::: hpc_elastic.errors

## Each error

"""  # noqa: E501

_TESTING = """# Tests

[Test preemptions](../../howto/test-preemptions.md) has a test of a script, and what to install.

<!-- Written by `python docs/generate.py` from docstrings below tools/. -->

## A fake Slurm

::: hpc_elastic.testing.fake_slurm.FakeSlurm
::: hpc_elastic.testing.fake_slurm.FakeConfig
::: hpc_elastic.testing.fake_slurm.Completed
::: hpc_elastic.testing.fake_slurm.FakeSlurmError
::: hpc_elastic.testing.fake_slurm.FakeCommandError
::: hpc_elastic.testing.fake_slurm.fake.fake_slurm

## A real Slurm on one machine

::: slurm_sandbox.SlurmSandbox
::: slurm_sandbox.SandboxConfig
"""

_TEXTS = {
    "script.md": _SCRIPT,
    "launch.md": _LAUNCH,
    "data.md": _DATA,
    "ft.md": _FT,
    "frameworks.md": _FRAMEWORKS,
    "errors.md": _ERRORS_PAGE + "".join(f"::: hpc_elastic.errors.{name}\n" for name in _ERRORS),
    "testing.md": _TESTING,
}
_NAME = re.compile(r"^::: ([^\s:]+)(?:: (.*))?$", re.MULTILINE)
"""A name, and the only methods that its page shows."""
