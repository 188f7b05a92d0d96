"""The module that the template of workers imports (engine.worker.fork_template)."""

TEMPLATE = "server.worker_imports"
