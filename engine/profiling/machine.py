"""What times of passes depend on, apart from the models."""

import os

import torch

from engine.native import library


def machine_facts(device: torch.device | str) -> dict[str, str]:
    """Return the processor or GPU, the number of processors and of threads, and the version of torch."""
    return {
        "processor": library.processor() if torch.device(device).type == "cpu" else torch.cuda.get_device_name(device),
        "num_processors": str(os.cpu_count()),
        "num_threads": str(library.num_threads()),
        "torch": str(torch.__version__),
    }
