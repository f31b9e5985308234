"""Devices of a pod: a thread reads them through NVML, if there are any.

`readings` has the records and the Protocol, `nvml` the library, `problems` decides what is a fault, `monitor` has the thread.
"""
