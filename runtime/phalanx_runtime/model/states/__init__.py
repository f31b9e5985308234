"""Layers that keep a state per request, such as Mamba's."""
