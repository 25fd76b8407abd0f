"""`python -m quire` is `quire`."""

from quire.api.cli import main

main()
