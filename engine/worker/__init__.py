"""The engine's own process: its loop, its messages, the client in the front end, restart and recovery."""
