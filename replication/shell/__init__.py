"""gRPC around the sessions: `service.py` is the leader's end, `fetchers.py` the follower's."""
