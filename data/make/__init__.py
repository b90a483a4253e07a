"""Makes datasets of files: what the prepare.py of each folder of data/ calls.

prepare.py writes token files on one machine, and pipeline.py those of a corpus, by steps that corpus_job.py starts;
readers.py reads texts and rows from files; messages.py and pairs.py encode conversations and pairs of answers. Read
prepare.py first; docs/data.md has examples.
"""
