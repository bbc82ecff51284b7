"""The shell around the Raft core: controllers, brokers' leases, and the channels to them.

controller.py, controller_plan.py, sessions.py   the active controller; its next proposals; sessions and leases
driver.py, links.py, hello.py    the core on an event loop; streams between voters
channel.py                       commands and reads sent to the active controller
voter_metadata.py, observed_metadata.py, image_feed.py   `MetadataPort` on a voter and on other nodes
service.py, peer_identity.py     the gRPC service; the nodes that certificates name
config.py, description.py        the configuration; the quorum as `describe` shows it
"""
