"""The server's configuration.

keys.py       every key: type, default, unit, Kafka's name, check
config.py     `BrokerConfig`, read from a file, the environment and flags, and checked as a whole
endpoints.py  addresses and listeners
"""
