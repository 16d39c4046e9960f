"""Launchers, one per file."""
