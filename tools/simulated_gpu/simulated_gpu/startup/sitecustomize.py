"""Load the simulated operators right after torch, in each Python process of a simulated machine."""

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterTorch(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        module.ops.load_library(os.environ["SIMULATED_GPU_OPERATORS"])
        module.backends.cudnn.enabled = False  # plain operators in place of fused kernels
        module.backends.cuda.enable_flash_sdp(False)
        module.backends.cuda.enable_mem_efficient_sdp(False)


if "SIMULATED_GPU_OPERATORS" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
