from kilogpt.islands.server import main

main()
