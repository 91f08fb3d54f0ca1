"""``python -m kdaserve``: the command line."""

from kdaserve.cli import main

main()
