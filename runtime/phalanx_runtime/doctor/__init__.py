"""`phalanx-runtime doctor`: what this machine offers to ranks, and what will be slow or broken.

`machine` has the records, `read` fills them, `verdicts` judges them.
"""
