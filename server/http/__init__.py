"""HTTP below the routes: errors, keys, limits, streaming, disconnects, logs and tracing."""
