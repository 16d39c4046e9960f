"""Errors of the stub."""


class RayError(Exception):
    pass
