"""The gRPC services, one module each; `calls.py` has what they share."""
