"""Set up before any test module is imported: shapes checked at run time, one torch thread, hypothesis without deadlines."""

import jaxtyping
import torch
from hypothesis import HealthCheck, settings

import tests.typechecking  # noqa: F401  (the hook looks it up as an attribute of `tests`)

# Kept installed for the whole run: test modules import the engine after this file.
_hook = jaxtyping.install_import_hook("engine", "tests.typechecking.checked")

torch.set_num_threads(1)

# No deadline: a test never asserts wall-clock time. Derandomised: a red run is red again.
settings.register_profile("latebranch", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("latebranch")
