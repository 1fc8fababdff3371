"""Page of the report: one self-contained HTML file with figures as inline SVG."""
