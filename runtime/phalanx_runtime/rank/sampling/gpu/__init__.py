"""Sampling by Triton kernels: state of rows on the device, samples, logprobs, verification."""
