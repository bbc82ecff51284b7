"""The commit log: what a broker keeps of its partitions on its disks.

partition_log     one log: append, read, flush, retention, truncation, compaction
segment, index    a `.log` file with its indexes
producer_state, transactions   what a log knows of its producers and of open transactions
recovery          opening a log after any kind of stop
flush             group commit
compaction, cleaner   which records of a compacted topic stay; rewriting logs in the background
integrity         finding damage on the disk
manager, log_dir  all logs of a broker, its log directories and their small files
config, storage   the settings of a log; the disk as a port
"""
