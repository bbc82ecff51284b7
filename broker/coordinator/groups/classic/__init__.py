"""Classic groups of Kafka clients: members join and sync, and one of them, the leader, makes the assignment.

commands.py    the commands and their replies
machine.py     the state machine of one group, as its live coordinator has it
calls.py       commands and deadlines of a group become operations of its machine, and its state records
consumer.py    the topics and partitions in the bytes that consumers exchange
"""
