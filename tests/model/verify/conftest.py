"""One thread: sums over a row do not depend on how many rows there are."""

import torch

torch.set_num_threads(1)
