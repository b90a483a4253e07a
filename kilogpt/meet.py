"""The former name of a command: python -m kilogpt.meet does what python -m kilogpt.islands does."""
from kilogpt.islands.server import main

main()
