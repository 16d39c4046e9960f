"""Where members run: one file a launcher."""
