"""Quotas of clients, and limits on their connections and streams (docs/quotas.md).

client_quotas.py  rates and delays of users and client ids: the pure core
manager.py        what sessions, services and the Kafka listener charge; interceptor of calls
heavy_work.py     checks and conversions of batches in threads, and each user's share of them
disk_reads.py     reads that wait for disks, in threads, and each user's share of them
new_producers.py  how many idempotent producers a user may begin within a time
room.py           what connections share, such as memory, and how much of it each user may hold
"""
