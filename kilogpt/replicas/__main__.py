"""Start the replicas of a run on this machine, and start each again by itself when it is lost."""
from kilogpt.replicas.launcher import main

main()
