"""Commands that read and write records.

produce.py           `raftlog produce`
consume.py           `raftlog consume`; reading.py reads for it, with or without a group
log_dump.py          `raftlog log dump`, on files
internal_records.py  records of the internal topics as JSON
"""
