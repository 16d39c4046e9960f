"""The parameter server: blocks, policies, server, client."""
