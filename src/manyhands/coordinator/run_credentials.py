"""The credentials of a run: certificates of its members, and the secret that they share."""

from __future__ import annotations

import secrets

from manyhands.transport import Authority, Credentials

MEMBERS = "manyhands members"
"""Name of the authority that issues the certificates of members."""


class RunCredentials:
    def __init__(self, *, certificates: bool, key_authority: Authority | None) -> None:
        """`certificates`: issue one to each member. `key_authority`: that of the run's key, if it has one,
        which agents trust."""
        self.secret = secrets.token_hex(32)
        # Members get certificates of this run alone: another run may have the same key.
        self._authority = Authority.create(MEMBERS) if certificates else None
        self._key_authority = key_authority

    def for_coordinator(self) -> Credentials:
        """Return credentials that members trust, and agents too if there is a key; they trust both."""
        assert self._authority is not None
        if self._key_authority is None:
            return self._authority.issue("coordinator")
        return self._key_authority.issue("coordinator", trusts=[self._authority])

    def for_member(self, name: str) -> Credentials | None:
        if self._authority is None:
            return None
        trusted = [self._key_authority] if self._key_authority else []
        return self._authority.issue(name, trusts=trusted)
