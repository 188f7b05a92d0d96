"""The command `latebranch` and its subcommands."""
