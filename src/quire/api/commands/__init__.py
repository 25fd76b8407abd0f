"""One file per command of the CLI; its name is the command's name."""
