"""The report's page: one HTML file that needs nothing else, with figures as inline SVG."""
