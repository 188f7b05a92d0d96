"""Several servers on one machine behind a gateway. `make cluster-test` runs them; without its environment they are skipped."""
