"""Imports the modules that a worker needs. The template process imports this module; workers are forked from it
(engine.worker.process)."""

import gc
import os
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the whole group; the front end handles it
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of NumPy, which works on small arrays: a forked process has no threads
gc.disable()  # imports leave little garbage, and collections among so many objects take a tenth of the time

import engine.build  # noqa: E402, F401
import selector.build  # noqa: E402, F401
from engine.utils.free_memory import return_free_memory  # noqa: E402
from engine.utils.process_name import name_process  # noqa: E402

name_process("latebranch-idle")
gc.freeze()  # a collection in a worker would write to every object, and so copy the shared memory
gc.enable()
return_free_memory()
