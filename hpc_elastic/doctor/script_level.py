"""The level that a script would have, by reading it (docs/explanation/levels.md); pure.

Nothing is executed or imported, so what other modules and configs decide is not seen: the finding
says what would be, and a worker prints what is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hpc_elastic.doctor.findings import Finding, ok, warn
from hpc_elastic.worker.own_checkpoints import find_option
from hpc_elastic.worker.script_loops import ScriptSource, why_not_continued

_WHY = "what is not exact trains some samples twice and others never when nodes come or go"
_FRAMEWORKS = {
    "lightning": "Lightning", "pytorch_lightning": "Lightning",
    "transformers": "Hugging Face", "trl": "Hugging Face",
}  # fmt: skip
_OWN_ORDER = ("IterableDataset", "BatchSampler", "WeightedRandomSampler", "SubsetRandomSampler")
_LIGHTNING = {
    "accumulate_grad_batches": "leave it at 1, and give a batch that fits",
    "overfit_batches": "give a dataset of that many samples",
    "reload_dataloaders_every_n_epochs": "pass the loader to fit()",
}
_HUGGING_FACE = {
    "enable_jit_checkpoint": "leave it out: the agent handles notices",
    "save_only_model": "give False",
    "auto_find_batch_size": "give a per_device_train_batch_size that fits",
    "save_on_each_node": "give a shared output_dir",
    "deepspeed": "leave it out",
    "fsdp": "leave it out",
}
"""Names that make a training inexact, and what to do instead."""
_NEUTRAL = (None, False, 0, 1, "")
"""Values with which such an argument changes nothing."""


def check_script(source: str, name: str) -> Finding:
    """Return the finding on the level of a script."""
    try:
        tree = ast.parse(source)
    except SyntaxError as e:
        return warn("script.level", f"{name} cannot be read: {e}", _WHY, "mend it")
    modules = set(_modules(tree))
    roots = {module.partition(".")[0] for module in modules}
    names = {node.id if isinstance(node, ast.Name) else node.attr
             for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)}  # fmt: skip
    if "hpc_elastic" in roots:
        return ok("script.level", f"{name} uses hpc_elastic: it would be as exact as it asks for")
    is_used = any(each.endswith("Trainer") or each == "LightningCLI" for each in names)
    framework = next((_FRAMEWORKS[r] for r in sorted(roots) if r in _FRAMEWORKS and is_used), None)
    if framework is None:
        return _check_plain(ScriptSource(source, name))
    table = _LIGHTNING if framework == "Lightning" else _HUGGING_FACE
    for what, remedy in _inexact(tree, table):
        return warn("script.level", f"{name} would be level 1: {what}", _WHY, remedy)
    return ok("script.level", f"{name} would be level 3: {framework}'s Trainer, as it is")


def _check_plain(script: ScriptSource) -> Finding:
    """Return the finding on a loop of the script's own."""
    tree, name = script.tree, script.file
    option, remedy = find_option(tree), "convert it: docs/howto/convert.md, about ten lines"
    resumes = f"; a restart would give {option[0]} its newest checkpoint" if option else ""
    if option is None:
        remedy += "; or give launcher.resume_args, if it reads its own checkpoints"
    shards = ("fully_shard", "FullyShardedDataParallel")
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Name | ast.alias)]
    names = {n.id if isinstance(n, ast.Name) else n.name for n in used}
    own = sorted(names & {*_OWN_ORDER, *shards})
    why = f"it uses {own[0]}" if own else why_not_continued(script)
    if why is not None:
        return warn("script.level", f"{name} would be level 1: {why}{resumes}", _WHY, remedy)
    found = f"{name} would be level 2, as far as reading shows: a plain loop loses no step"
    return ok("script.level", f"{found}, and its batch changes with the workers{resumes}")


def _inexact(tree: ast.AST, table: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what makes a training inexact, with its line, and what to do; constants only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in _OWN_ORDER:
                yield f"{name} in line {node.lineno}", "use a map-style dataset and shuffle"
        elif isinstance(node, ast.arg) and node.arg == "dataloader_iter":
            yield f"{node.arg} in line {node.lineno}", "let training_step take the batch"
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            key, value = node.arg or "", node.value.value
            if key in table and (value is True or value not in _NEUTRAL):
                yield f"{key}={value!r} in line {node.lineno}", table[key]
            if key == "strategy" and str(value).startswith(("deepspeed", "fsdp")):
                remedy = 'use "ddp" or ModelParallelStrategy'
                yield f"strategy={value!r} in line {node.lineno}", remedy


def _modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
