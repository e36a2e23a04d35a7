"""What all benchmarks share: results as data, the page that tells them, what they stand on."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))  # the soak, not installed
