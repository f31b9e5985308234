"""`phalanx-runtime quantize`."""
