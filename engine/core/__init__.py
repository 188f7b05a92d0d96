"""Records and enumerations that every other package uses: requests, events, trees, step plans, configuration, protocols."""
