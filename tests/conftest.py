"""Settings for all tests."""

import torch

# Tiny tensors gain nothing from a second thread, and threads that wait for a busy core cost a lot.
torch.set_num_threads(1)
