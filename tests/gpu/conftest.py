"""Tests on simulated GPUs, with torch's CUDA build: `scripts/test --gpu` runs them."""

pytest_plugins = ["simulated_gpu.pytest_plugin"]
