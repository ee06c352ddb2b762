"""`python -m infini_run`: the same command."""

from infini_run.cli import main

main()
