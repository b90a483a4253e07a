"""The command python -m kilogpt.islands: start the server of server.py."""
from kilogpt.islands.server import main

main()
