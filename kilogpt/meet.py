"""The former name of a command: python -m kilogpt.meet starts the server of kilogpt/islands/server.py."""
from kilogpt.islands.server import main

main()
