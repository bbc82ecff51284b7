"""The server's configuration.

config.py     `BrokerConfig`: every key with its type, default and unit; read from a file, the environment and flags
checks.py     checks of the values together, and warnings
endpoints.py  addresses and listeners
"""
