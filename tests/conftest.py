"""One thread a process: small tensors gain nothing from more, and results stay equal from machine to machine."""

import torch

torch.set_num_threads(1)
