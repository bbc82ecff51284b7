"""The replicas that this broker holds, as the metadata image says.

replica_manager.py   `ReplicaManager`: partitions are opened, given their roles and closed with the image
partition_logs.py    their logs: opened, made, deleted, set aside
isr.py               what this broker asks of the controller: ISR changes, offline replicas
"""
