"""What happened in a run, on one page. Start with __main__.py; events.py reads what kilogpt/run/events.py writes."""
