"""Start the server at which islands, the jobs of one run over slow networks, exchange their parameters."""
from kilogpt.islands.server import main

main()
