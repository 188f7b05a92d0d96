"""Servers in several processes, and several behind a gateway. Skipped without the environment of `make cluster-test`."""
