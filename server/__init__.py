"""The HTTP server: routes, schemas, text, keys and limits, metrics, and the command `latebranch`."""
