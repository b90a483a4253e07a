from kilogpt.plan.planner import main

main()
