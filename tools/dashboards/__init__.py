"""Grafana dashboards as code: records here, built by Grafana's foundation SDK, written as ConfigMaps by `make golden`."""
