from kilogpt.plot.curves import main

main()
