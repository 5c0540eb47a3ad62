"""A run, a flip or a finding as one HTML page, and its charts as SVG. No torch."""
