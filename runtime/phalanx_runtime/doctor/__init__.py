"""`phalanx-runtime doctor`: what this machine offers to ranks, and what will be slow or broken.

`verdicts` has the records of a machine and judges them, `read` fills them.
"""
