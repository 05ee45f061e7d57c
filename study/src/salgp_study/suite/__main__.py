"""``python -m salgp_study.suite``: the shift suite on the command line."""

from salgp_study.suite.command import main

main()
