"""HTTP handlers: thin, one file a resource."""
