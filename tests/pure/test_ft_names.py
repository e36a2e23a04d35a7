"""torchft's names without an implementation: imported freely, refused when used."""

import importlib

import pytest

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.ft import _unavailable


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("collectives", "allreduce_quantized"),
        ("coordination", "LighthouseClient"),
        ("otel", "setup_logger"),
        ("process_group", "ProcessGroupXCCL"),
    ],
)
def test_a_name_without_implementation_raises_when_it_is_used(module, name):
    """It names itself and the remedy, as the package's error and as Python's."""
    found = getattr(importlib.import_module(f"hpc_elastic.ft.{module}"), name)
    with pytest.raises(NotImplementedError, match=rf"ft\.{module}\.{name} has no.*: \w") as caught:
        found("an", argument=1)
    assert isinstance(caught.value, HpcElasticError)


@pytest.mark.parametrize("module", [*_unavailable.NAMES])
def test_other_names_are_no_attributes(module):
    """So hasattr, and a spelling mistake, behave as everywhere."""
    found = importlib.import_module(f"hpc_elastic.ft.{module}")
    with pytest.raises(AttributeError, match=r"'hpc_elastic.ft.*Mistake'"):
        _ = found.Mistake
