"""The command line: `main` finds the subcommand, each of which is a module here."""
