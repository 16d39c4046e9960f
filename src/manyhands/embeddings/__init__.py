"""Sparse tables: rows by 64-bit id, in memory that the processes of a host share."""
