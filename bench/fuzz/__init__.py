"""Sends mutated requests and files to the API server and the loaders, and counts how each is answered.

`python -m bench.fuzz --requests 10000 --sockets 100 --files 1000 --seed 1` prints totals, and for each failure the words that
repeat it: `python -m bench.fuzz --replay KIND:SEED:INDEX`.
"""
