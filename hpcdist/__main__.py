"""`python -m hpcdist`: the command `hpcdist`."""

from hpcdist.cli.main import main

main()
