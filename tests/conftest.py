"""Settings for all tests."""

import os

import torch

# Tiny models lose more to thread hand-over than they gain, above all on a machine that runs something else as well.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Kernels run on the CPU, in Triton's interpreter: it decides that as it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
