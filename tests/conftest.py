"""Settings for all tests."""

import torch

# Tiny models lose more to thread hand-over than they gain, above all on a machine that runs something else as well.
torch.set_num_threads(1)
