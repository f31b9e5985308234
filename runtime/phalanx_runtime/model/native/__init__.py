"""Kernels in C++ for what torch lacks on CPU, compiled at first use. Everything here has a twin in plain torch."""
