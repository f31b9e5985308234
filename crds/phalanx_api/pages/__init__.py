"""What the pages of router and operator share: styles, scripts, headers, and the reading of static files."""
