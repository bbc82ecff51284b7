"""Ports, certificates and gRPC services.

listeners.py      the ports of a gRPC server: plaintext, TLS, or both on one port
calls.py          limits on calls, and the users that are shut out for floods of them
answers.py        the memory of answers to unary calls, until their callers have read them
connections.py    limits on connections, and the watch over those that gRPC has accepted
revocation.py     certificates that their CAs have revoked
tls.py            the node's certificates, checked before use and renewed without a restart
interceptors.py   around every call: request bounds, the peer node's identity, timing
services/         one module for each gRPC service; calls.py holds what they share
"""
