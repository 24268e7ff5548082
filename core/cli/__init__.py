"""The command line: one file per command, loaded only when that command is called."""
