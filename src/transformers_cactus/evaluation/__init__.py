"""What a pair of models does under a rule, measured on the verifier's own text: calibration and comparison.

One idea a file: `sampling` and `texts` say what is read, `positions` reads it, `rounds` and `measures` turn a rule's
behaviour there into sums, `estimates` turns sums into numbers with intervals. `calibration` and `sweep` build on them.
"""

from .calibration import Calibration, calibrate, check_calibration
from .prompts import read_prompts, write_prompts
from .sampling import Sampling

__all__ = ["Calibration", "Sampling", "calibrate", "check_calibration", "read_prompts", "write_prompts"]
