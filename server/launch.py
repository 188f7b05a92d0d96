"""The module that the template of workers imports (engine.worker.template)."""

TEMPLATE = "server.template"
