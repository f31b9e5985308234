"""Writes the generated manifests: `python -m tools.dashboards`."""

from tools.dashboards.build import generated_files

for path, text in generated_files().items():
    path.write_text(text)
