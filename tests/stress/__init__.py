"""Programs that load a server for a long time, and short runs of them as tests."""
