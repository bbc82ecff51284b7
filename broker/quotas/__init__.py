"""Quotas of clients, and limits on their connections and streams (docs/quotas.md).

client_quotas.py  rates and delays of users and client ids: the pure core
manager.py        what sessions, services and the Kafka listener charge; interceptor of calls
conversions.py    where batches of Kafka clients are converted, and each user's share of that
room.py           what connections share, such as memory, and how much of it each user may hold
"""
