"""Authentication, permissions and the audit log of the listener for clients.

client_listener.py  the parts of one broker, put together
identify.py         an interceptor that identifies each caller; tokens
scram.py            SCRAM exchanges
users.py            credentials of the metadata and of the broker's own file
permissions.py      an interceptor that checks each call; the table of what a call needs
authorizer.py       decisions by ACLs
caller.py           the caller of a call, and the decisions that a session keeps
audit.py            the audit log
audit_topic.py      its lines as records of a topic
"""
