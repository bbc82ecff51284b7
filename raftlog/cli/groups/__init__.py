"""`raftlog group`: groups.py lists and describes, reset_offsets.py plans and sets offsets."""
